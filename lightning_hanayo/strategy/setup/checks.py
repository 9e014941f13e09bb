"""Rejects what a pipeline can't run, before the first message; runs uncompiled what can't be compiled.

torch.compile(model), self.compile(), @torch.compile    the step is suspended at each block: no graph can contain it
blocks of a pipeline                                     stay compiled, where they run
registered blocks of a cube, by block.compile()          stay compiled: their layers are operators in the graph
other blocks of a cube                                   ranks ask each other before each layer: no graph contains that
mode="reduce-overhead", "max-autotune"                   rejected: CUDA graphs write into the memory of earlier outputs
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from traceback import walk_tb
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from lightning_hanayo.errors import HanayoError, UnsupportedError, listed
from lightning_hanayo.packed_values import is_packed
from lightning_hanayo.partition.stack import Stack, modules_outside, original
from lightning_hanayo.pipeline_parallel.grad_sync import sparse_weights
from lightning_hanayo.strategy.lightning import user_hooks
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.tensor_parallel.sharding import shards_of
from lightning_hanayo.topology import Topology


def check_run(
    trainer: "pl.Trainer", module: "pl.LightningModule", options: Options, topology: Topology, *, syncs_batchnorm: bool
) -> None:
    """Check module and callbacks. Needs no process group; called before launch and again once the model is built.

    Raises:
        HanayoError: something can't be run, or an option can't be followed.
    """
    has_several_stages = options.num_waves not in ("auto", 1) or options.schedule != "auto"
    if topology.replica_size > 1 or has_several_stages:
        _check_loop(module)
    if topology.replica_size > 1 and syncs_batchnorm:
        raise UnsupportedError(
            "Trainer(sync_batchnorm=True) synchronizes BatchNorm over all processes, which hold different stages. "
            "Leave it out; statistics are per micro-batch."
        )
    for name in ("accumulate_grad_batches", "val_check_interval"):  # Lightning takes a zero, and divides by it
        value = getattr(trainer, name, None)  # an interval in time is kept elsewhere
        if isinstance(value, int | float) and value <= 0:
            raise HanayoError(f"Trainer({name}={value!r}): expected a number above 0")
    if options.balance == "time" and module.example_input_array is None:
        raise HanayoError(
            f"balance='time' measures the blocks while the model runs on example_input_array, but "
            f"{type(module).__name__} has none. Set it, or give balance one cost per block."
        )
    for name in sparse_weights(module) if prod(topology.cube) > 1 else ():  # a cube sums gradients in flat buffers
        raise UnsupportedError(f"{name} has sparse gradients, which a cube can't sum; make it sparse=False")
    _check_callbacks(trainer, options, topology)
    _check_precision(trainer, topology)
    _check_graph(trainer, module, topology)
    if topology.world_size > 1 and not options.save_full:
        _check_loggers(trainer)


def check_shapes(model: nn.Module) -> None:
    """Reject parameters that get their shapes in the first step.

    Raises:
        UnsupportedError: there is one, as in a `LazyLinear` that has never run.
    """
    if lazy := [name for name, one in model.named_parameters() if isinstance(one, UninitializedParameter)]:
        raise UnsupportedError(
            f"these parameters of lazy modules have no shape before they run: {listed(lazy)}. A pipeline is planned "
            "from all shapes, before the first step. Run the module once on zeros, for example in configure_model()."
        )


def check_not_converted(module: nn.Module) -> None:
    """Reject a copy of a model whose layers are sharded over a cube.

    Raises:
        UnsupportedError: it is one.
    """
    for name, part in module.named_modules():
        if shards_of(part):
            raise UnsupportedError(
                f"{name} holds one rank's part of its weights: this {type(module).__name__} is a copy of one that was "
                "trained on a cube. Train what trainer.strategy.gather_model() returns."
            )


def check_quantized_layers(model: nn.Module) -> None:
    """Reject layers whose weights are packed, or that compute in fp8, which the ranks of a cube can't share.

    Raises:
        UnsupportedError: there is one, as in the quantized layers of bitsandbytes and torchao.
    """
    for name, part in model.named_modules():
        packed = next((one for one in part.parameters(recurse=False) if is_packed(one)), None)
        if packed is not None:
            why = f"whose weights are packed: its parameter of the class {type(packed).__name__} can't be sharded over "
            why += "the ranks of a cube"
        elif type(part).__name__ == "Float8Linear":
            why = "which scales by the largest value of a micro-batch, of which each rank of a cube has a share"
        else:
            continue
        raise UnsupportedError(
            f"{name} is a {type(part).__name__}, {why}. Quantized layers train on pipelines: leave the cube out, or "
            f"quantize none of the model's layers."
        )


def check_batch_statistics(model: nn.Module, stack: Stack, options: Options) -> None:
    """Reject BatchNorm where each rank of a cube would normalise by statistics of its own samples.

    Raises:
        UnsupportedError: there is one in training mode.
    """
    outside = set(modules_outside(model, stack))
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, _BatchNorm) and part.training]
    inside = [(name, part) for name, part in found if part not in outside]
    in_shares = options.cube_outside == "share" and (options.step == "microbatch" or options.pairs)
    for name, part in inside or (found if in_shares else ()):
        way_out = "Leave out step='microbatch' and pairs=True: then the step runs once, on the whole batch"
        if inside:
            way_out = "Within the stack use LayerNorm or GroupNorm, or leave the cube out"
        raise UnsupportedError(
            f"{name} is a {type(part).__name__}, which normalises by the mean of a batch, but on a cube each rank "
            f"runs it on its own samples. {way_out}."
        )


OF_MICROBATCHES = "will normalise by the mean of each of the"


def warn_of_batch_statistics(model: nn.Module, num_microbatches: int, *, except_of: Collection[nn.Module] = ()) -> None:
    """Warn of BatchNorm, which normalises by the mean of a micro-batch, and not of the batch."""
    found = [
        f"{name} ({type(part).__name__})"
        for name, part in model.named_modules()
        if isinstance(part, _BatchNorm) and part.training and part not in set(except_of)
    ]
    if found and num_microbatches > 1:
        rank_zero_warn(
            f"{listed(found, 3)} {OF_MICROBATCHES} {num_microbatches} micro-batches of a batch: the training depends "
            "on num_microbatches. GroupNorm, LayerNorm and BatchNorm in eval mode don't."
        )


@contextmanager
def explaining_single_samples(model: nn.Module) -> Iterator[None]:
    """Inside it, BatchNorm's complaint about a single value per channel becomes one that names module and way out."""
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        callers = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
        names = {part: name for name, part in model.named_modules()}
        part = next((names[one] for one in callers if isinstance(one, _BatchNorm) and one in names), "BatchNorm")
        raise UnsupportedError(
            f"{part} normalises by the mean of a micro-batch, which has a single sample: {error}. Set a smaller "
            "num_microbatches, leave out a smaller last batch (drop_last=True), or use GroupNorm or LayerNorm."
        ) from error


def _check_loop(module: "pl.LightningModule") -> None:
    """Check that Lightning drives the step: a pipeline cuts batches, and runs the step's backward itself."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{name} uses manual optimization (automatic_optimization=False), but a pipeline runs all backwards "
            "itself. Let Lightning drive the optimizer, or set pipeline_parallel_size=1 without waves or a schedule."
        )
    if user_hooks.takes_dataloader_iter(module):
        raise UnsupportedError(
            f"{name}.training_step takes dataloader_iter, but a pipeline cuts each batch into micro-batches. "
            f"Take `batch` instead."
        )


def _check_callbacks(trainer: "pl.Trainer", options: Options, topology: Topology) -> None:
    for callback in user_hooks.callbacks_of(trainer):
        name = type(callback).__name__
        if topology.replica_size > 1 and isinstance(callback, ModelPruning):
            raise UnsupportedError(
                f"the callback {name} replaces parameters while the model is trained, but ranks have chosen by then "
                "which they hold. Prune the model before training, or what trainer.strategy.gather_model() returns."
            )
        if options.master_weights is not None and isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise UnsupportedError(
                f"the callback {name} averages the rounded weights, but with master_weights='fp32' the optimizer goes "
                "on from weights of its own. Leave master_weights out, or train with precision='bf16-mixed'."
            )


def _check_precision(trainer: "pl.Trainer", topology: Topology) -> None:
    """Transformer Engine's fp8 context is one per process, but the steps of several micro-batches are under way."""
    if topology.replica_size > 1 and isinstance(trainer.precision_plugin, TransformerEnginePrecision):
        raise UnsupportedError(
            "precision='transformer-engine' keeps the scales of fp8 in a state of the process, which micro-batches "
            "would mix up. Use precision='bf16-true' or 'bf16-mixed', or data ranks alone."
        )


def _check_graph(trainer: "pl.Trainer", module: "pl.LightningModule", topology: Topology) -> None:
    """To draw the graph, a logger of rank 0 runs the model."""
    if topology.replica_size == 1 or module.example_input_array is None:
        return
    for logger in user_hooks.loggers_with(trainer, user_hooks.DRAWS):
        raise UnsupportedError(
            f"{type(logger).__name__}(log_graph=True) runs the model, which no rank holds. Leave it out, and before "
            "trainer.fit call logger.experiment.add_graph(module, module.example_input_array) on rank 0."
        )


def _check_loggers(trainer: "pl.Trainer") -> None:
    """Lightning's loggers look for files, and leave out folders without a word."""
    savers = (one for one in user_hooks.callbacks_of(trainer) if isinstance(one, ModelCheckpoint))
    if all(one.save_weights_only for one in savers):  # into files
        return
    for logger in user_hooks.loggers_with(trainer, user_hooks.UPLOADS):
        raise UnsupportedError(
            f"{type(logger).__name__}(log_model=...) uploads checkpoints that are files, but several ranks save "
            "folders. Set HanayoStrategy(save_full=True) or ModelCheckpoint(save_weights_only=True), or upload it."
        )


_ENTRIES = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_ORIGINAL = "_torchdynamo_orig_callable"
"""the attribute in which torch.compile keeps the function itself"""


def check_cuda_graphs(model: nn.Module, stack: Stack) -> None:
    """Reject modules that CUDA graphs run: each micro-batch would overwrite the results of the one before.

    Those around the stack run as written, and may be compiled in any way.

    Raises:
        UnsupportedError: a module is compiled in such a mode.
    """
    blocks = set(stack.blocks)
    for name, part in model.named_modules():
        if _uses_cuda_graphs(part) and not _is_around(part, blocks):
            raise UnsupportedError(
                f"{name} is compiled with CUDA graphs, which write each micro-batch's result where the last one's was. "
                "Compile it with the default mode, or with mode='max-autotune-no-cudagraphs'."
            )


def run_uncompiled(
    module: "pl.LightningModule", stack: Stack, attributes: TemporaryAttributes, *, is_registered: bool | None = None
) -> None:
    """Run compiled modules around the stack as written, in a cube also blocks, and warn with their names.

    `is_registered`: of the blocks in a cube, whether their code is known; None without one.
    """
    blocks, parts = set(stack.blocks), dict(module.named_modules())
    around = {name: part for name, part in parts.items() if _is_around(part, blocks)}
    in_blocks = {part for block in blocks for part in block.modules()}
    inside = {name: part for name, part in parts.items() if original(part) in in_blocks}
    in_cube = "layers communicate in the cube. Set cube=1 to run them compiled"
    if is_registered:
        inside = {name: part for name, part in inside.items() if original(part) is not part}
        in_cube = "layers communicate in the cube. Compile them in place, with block.compile()"
    suspended = "the step is suspended there. Compile the blocks instead, with block.compile()"
    for names, why in (
        ([*_steps(module, attributes), *_uncompiled(around, attributes)], suspended),
        ([] if is_registered is None else _uncompiled(inside, attributes), in_cube),
    ):
        if names:
            warnings.warn(
                f"{', '.join(name or type(module).__name__ for name in names)}: compiled, but run as written, because "
                f"of the stack {stack.name!r}: {why}.",
                stacklevel=2,
            )


def _uses_cuda_graphs(part: nn.Module) -> bool:
    """Whether the module, its call or its `forward` is compiled so that inductor records CUDA graphs."""
    compiled: tuple[Any, ...] = part, part._compiled_call_impl, part.forward
    configs = [one.get_compiler_config() for one in compiled if hasattr(one, "get_compiler_config")]
    return any(config is not None and config.get("triton.cudagraphs", False) for config in configs)


def _is_around(part: nn.Module, blocks: set[nn.Module]) -> bool:
    """Whether blocks are in it, and it is none of them, nor a compiled one."""
    return blocks.isdisjoint((part, original(part))) and not blocks.isdisjoint(part.modules())


def _steps(module: "pl.LightningModule", attributes: TemporaryAttributes) -> Iterable[str]:
    """Replace the module's compiled methods, and yield their names."""
    for name in _ENTRIES:
        method = getattr(module, name)
        plain = getattr(method, _ORIGINAL, None)
        if plain is not None:
            attributes.set(module, name, MethodType(plain, module) if isinstance(method, MethodType) else plain)
            yield name


def _uncompiled(parts: Mapping[str, nn.Module], attributes: TemporaryAttributes) -> list[str]:
    """Run the modules' own code where they are called; returns the names of those that were compiled."""
    names = []
    for name, part in parts.items():
        inner = original(part)
        if inner is not part or part._compiled_call_impl is not None:
            attributes.set(part, *(("forward", inner) if inner is not part else ("_compiled_call_impl", None)))
            names.append(name)
    return names
