"""Rejects what a pipeline can't run, each with an error that names it, before the first message."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from traceback import walk_tb
from typing import NoReturn

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hanayo.errors import HanayoError, UnsupportedError, listed
from lightning_hanayo.packed_values import is_packed
from lightning_hanayo.partition.stack import Stack, modules_outside
from lightning_hanayo.runtime.autograd.gradient_all_reduce import sparse_weights
from lightning_hanayo.strategy.lightning.user_hooks import (
    callbacks_of,
    draws_graph,
    takes_dataloader_iter,
    uploads_checkpoints,
)
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.tensor3d.sharding import shards_of
from lightning_hanayo.topology import Topology


def check_run(
    trainer: "pl.Trainer",
    module: "pl.LightningModule",
    options: Options,
    topology: Topology,
    *,
    synchronizes_batchnorm: bool,
) -> None:
    """Check module and callbacks. Needs no process group; called before launch and again once the model is built.

    Raises:
        HanayoError: something can't be run, or an option can't be followed.
    """
    has_several_stages = options.num_waves not in ("auto", 1) or options.schedule != "auto"
    if topology.replica_size > 1 or has_several_stages:
        _check_loop(module)
    if topology.replica_size > 1 and synchronizes_batchnorm:
        raise UnsupportedError(
            "Trainer(sync_batchnorm=True) synchronizes BatchNorm over all processes, which hold different stages. "
            "Leave it out; statistics are per micro-batch."
        )
    _check_intervals(trainer)
    _check_example(module, options)
    _check_gradients(module, topology)
    _check_callbacks(trainer, options, topology)
    _check_precision(trainer, topology)
    _check_graph(trainer, module, topology)
    if topology.world_size > 1 and not options.save_full:
        _check_loggers(trainer)


def check_not_converted(module: nn.Module) -> None:
    """Reject a copy of a model whose layers are sharded over a cube.

    Raises:
        UnsupportedError: it is one.
    """
    for name, part in module.named_modules():
        if shards_of(part):
            raise UnsupportedError(
                f"{name} holds one rank's part of its weights: this {type(module).__name__} is a copy of one that "
                f"was trained on a cube of ranks. Train that one, or what trainer.strategy.gather_model() returns, or "
                f"build it anew and load a checkpoint."
            )


def check_packed_parameters(model: nn.Module) -> None:
    """Reject parameters whose values are packed, which the ranks of a cube can't shard.

    Raises:
        UnsupportedError: there is one, as in the quantized layers of bitsandbytes and torchao.
    """
    for name, part in model.named_modules():
        for parameter in part.parameters(recurse=False):
            if is_packed(parameter):
                raise UnsupportedError(
                    f"{name} is a {type(part).__name__}, whose weights are packed: its parameter of the class "
                    f"{type(parameter).__name__} can't be sharded over the ranks of a cube. Quantized layers train on "
                    f"pipelines: leave the cube out, or quantize none of the model's layers."
                )


def check_batch_statistics(model: nn.Module, stack: Stack, options: Options) -> None:
    """Reject BatchNorm where each rank of a cube would normalise by statistics of its own samples.

    Raises:
        UnsupportedError: there is one in training mode.
    """
    outside = set(modules_outside(model, stack))
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, _BatchNorm) and part.training]
    inside = [(name, part) for name, part in found if part not in outside]
    for name, part in inside or (found if options.cube_outside == "share" else ()):
        way_out = "Set HanayoStrategy(cube_outside='replicate'), where all ranks run it on whole micro-batches"
        if inside:
            way_out = "Within the stack use LayerNorm or GroupNorm, or leave the cube out"
        raise UnsupportedError(
            f"{name} is a {type(part).__name__}, which normalises by the mean of a batch, but on a cube each rank "
            f"runs it on its own samples. {way_out}."
        )


def warn_of_batch_statistics(model: nn.Module, num_microbatches: int) -> None:
    """Warn of BatchNorm, which normalises by the mean of a micro-batch, and not of the batch."""
    found = [
        f"{name} ({type(part).__name__})"
        for name, part in model.named_modules()
        if isinstance(part, _BatchNorm) and part.training
    ]
    if found and num_microbatches > 1:
        rank_zero_warn(
            f"{listed(found, 3)} will normalise by the mean of each of the {num_microbatches} micro-batches of a "
            f"batch: the training depends on num_microbatches, as with accumulate_grad_batches. GroupNorm, LayerNorm "
            f"and BatchNorm in eval mode don't."
        )


@contextmanager
def explaining_single_samples(model: nn.Module, sizes: Sequence[int] = ()) -> Iterator[None]:
    """Inside it, BatchNorm's complaint about a single value per channel becomes one that names module and way out.

    `sizes`: the samples of this rank's micro-batches, where they are known.
    """
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        callers = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
        names = {part: name for name, part in model.named_modules()}
        part = next((names[one] for one in callers if isinstance(one, _BatchNorm) and one in names), "BatchNorm")
        cut = f" (a batch was cut into {', '.join(map(str, sizes))} samples)" if sizes else ""
        raise UnsupportedError(
            f"{part} normalises by the mean of a micro-batch, which has a single sample{cut}: {error}. Set a smaller "
            f"HanayoStrategy(num_microbatches=...), leave out a smaller last batch (DataLoader(drop_last=True)), or "
            f"use GroupNorm, LayerNorm, or BatchNorm in eval mode."
        ) from error


def reject_stop() -> NoReturn:
    """Reject a step that ends the run: it runs on one rank, and the others would wait for the next batch.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "training_step set trainer.should_stop, which the other ranks of the model don't see. Set it in a hook that "
        "runs on all ranks, such as on_train_batch_end, which finds what the step has logged in "
        "trainer.callback_metrics."
    )


def _check_loop(module: "pl.LightningModule") -> None:
    """What cuts a batch, or runs a step in parts, drives the step's backward itself."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{name} uses manual optimization (automatic_optimization=False), but a pipeline runs the backward of all "
            f"its stages and micro-batches itself, within the training step. Let Lightning drive the optimizer, or set "
            f"pipeline_parallel_size=1 without waves or a schedule, with as many data ranks as you like."
        )
    if takes_dataloader_iter(module):
        raise UnsupportedError(
            f"{name}.training_step takes dataloader_iter, but a pipeline cuts each batch into micro-batches. "
            f"Take `batch` instead."
        )


def _check_intervals(trainer: "pl.Trainer") -> None:
    """Lightning takes a zero, and divides by it in the first batch."""
    for name in ("accumulate_grad_batches", "val_check_interval"):
        value = getattr(trainer, name, None)  # an interval in time is kept elsewhere
        if isinstance(value, int | float) and value <= 0:
            raise HanayoError(f"Trainer({name}={value!r}): expected a number above 0")


def _check_example(module: "pl.LightningModule", options: Options) -> None:
    """`balance="time"` needs something to measure."""
    if options.balance == "time" and module.example_input_array is None:
        raise HanayoError(
            f"balance='time' measures the blocks while the model runs on example_input_array, but "
            f"{type(module).__name__} has none. Set it, or give balance one cost per block."
        )


def _check_gradients(module: "pl.LightningModule", topology: Topology) -> None:
    """The ranks of a cube shard weights, and sum their gradients in flat buffers."""
    if prod(topology.cube) > 1:
        for name in sparse_weights(module):
            raise UnsupportedError(f"{name} has sparse gradients, which a cube can't sum; make it sparse=False")


def _check_callbacks(trainer: "pl.Trainer", options: Options, topology: Topology) -> None:
    for callback in callbacks_of(trainer):
        name = type(callback).__name__
        if topology.replica_size > 1 and isinstance(callback, ModelPruning):
            raise UnsupportedError(
                f"the callback {name} replaces parameters (weight becomes weight_orig and weight_mask) while the model "
                f"is trained, but each rank of a pipeline or a cube has chosen by then which it holds. Prune the whole "
                f"model before training or after it: trainer.strategy.gather_model() returns it on rank 0."
            )
        if options.master_weights is not None and isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise UnsupportedError(
                f"the callback {name} averages the rounded weights of the model and sets them, but with "
                f"master_weights='fp32' the optimizer goes on from weights of its own. Leave master_weights out, or "
                f"train with precision='bf16-mixed', where the model's weights are in fp32."
            )


def _check_precision(trainer: "pl.Trainer", topology: Topology) -> None:
    """Transformer Engine's fp8 context is one per process, but the steps of several micro-batches are under way."""
    if topology.replica_size > 1 and isinstance(trainer.precision_plugin, TransformerEnginePrecision):
        raise UnsupportedError(
            "precision='transformer-engine' keeps the scales of fp8 in a state of the process, which the micro-batches "
            "of a pipeline would mix up. Use precision='bf16-true' or 'bf16-mixed', or only data ranks "
            "(HanayoStrategy(pipeline_parallel_size=1, data_parallel_size='auto'))."
        )


def _check_graph(trainer: "pl.Trainer", module: "pl.LightningModule", topology: Topology) -> None:
    """To draw the graph, a logger of rank 0 runs the model."""
    if topology.replica_size == 1 or module.example_input_array is None:
        return
    for logger in filter(draws_graph, trainer.loggers):
        raise UnsupportedError(
            f"{type(logger).__name__}(log_graph=True) runs the model on example_input_array, but no rank holds the "
            f"whole model. Leave it out, and before trainer.fit call "
            f"logger.experiment.add_graph(module, module.example_input_array) on rank 0."
        )


def _check_loggers(trainer: "pl.Trainer") -> None:
    """Lightning's loggers look for files, and leave out folders without a word."""
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks_of(trainer)):
        return
    for logger in filter(uploads_checkpoints, trainer.loggers):
        raise UnsupportedError(
            f"{type(logger).__name__}(log_model=...) uploads checkpoints that are files, but several ranks save "
            f"folders. Let rank 0 gather them into one file: HanayoStrategy(save_full=True). Or leave log_model out, "
            f"and upload the folder trainer.checkpoint_callback.best_model_path yourself."
        )
