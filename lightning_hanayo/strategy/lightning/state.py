"""Where the Trainer is, and what it does with losses and optimizers: batch, accumulation, loss scale, wrappers.

Where the Trainer's loops are: the batch under way, its number, and its place in an accumulation.

Loss scaling of Lightning's precision plugins: one scale, and one decision to skip a step, on all ranks.

rank 0    gradients are finite     found_inf 0   --+-- all-reduce --   1, skip    scale / 2
rank 1    one gradient is inf      found_inf 1   --+                   1, skip    scale / 2

Optimizers as Lightning wraps and moves them, where some parameters are placeholders.

What Lightning shows of a run: model summaries, FLOPs, profiles, throughput, and one line on what runs.

Counts FLOPs of the whole model on the meta device, and what the device could do.

Lets Lightning's model summaries show the whole model where this rank holds a part of it.

set-up      the module, still whole      ->  a copy with all tensors on the meta device
summary     `example_input_array` runs through the copy: sizes and FLOPs, without values or devices

Lets Lightning's `PyTorchProfiler` see a pipeline: all threads, and steps that are under way at the same time.

main thread    F stage 0 micro-batch 0 | F stage 0 micro-batch 1 | ...      ranges of the engine
step's thread    [pl][module]...: embedding   ... suspended ...   head      ranges of modules, one set per thread

Says in one line what a run does with its ranks, its samples and their memory.

ddp on 4 devices         4 batches of the loader in each step
a pipeline of 4 ranks    1 batch

Lets Lightning's `ThroughputMonitor` count a batch once, although several ranks work on it.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_hanayo.errors import UnsupportedError, available, counted
from lightning_hanayo.partial_values import PartialValues
from lightning_hanayo.partition.deferred_init import MetaCopy
from lightning_hanayo.partition.guards import MissingValues
from lightning_hanayo.partition.ownership import Ownership
from lightning_hanayo.partition.stack import Stack
from lightning_hanayo.pipeline_parallel.trace import RANGE
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.planner.ranking import bytes_of
from lightning_hanayo.strategy.lightning.loops import batch_size
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.topology import Topology

DefaultDtype = _DtypeContextManager
"""inside it, new floating-point tensors have the dtype that it is given"""


def batch_idx(trainer: "pl.Trainer") -> int:
    """The number of the training batch under way in its epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1


def batch_key(trainer: "pl.Trainer") -> str:
    """Names the batch under way: the same on every layout and after a resume, different for every batch of a run.

    In training: the optimizer step and the batch's place among those that are accumulated for it. In evaluation: the
    step after which it takes place and the batch's number in it.
    """
    stage = trainer.state.stage
    assert stage is not None  # Lightning sets it before it runs a loop
    if trainer.training:
        return f"{stage.value} {trainer.global_step} {batch_idx(trainer) % trainer.accumulate_grad_batches}"
    loop: Any = trainer._active_loop
    return f"{stage.value} {trainer.global_step} {loop.batch_progress.current.ready - 1}"


def current_results(trainer: "pl.Trainer") -> Any:
    """Where Lightning collects what is logged now; None in predict. In training found without asking for the loop."""
    is_fit = trainer.state.stage is RunningStage.TRAINING
    return trainer.fit_loop.epoch_loop._results if is_fit else trainer._results


def continues_accumulation(trainer: "pl.Trainer") -> bool:
    """Whether Lightning won't zero the gradients for this batch."""
    return batch_idx(trainer) % trainer.accumulate_grad_batches != 0


def share_of_step(trainer: "pl.Trainer") -> float:
    """Lightning's factor for a batch's loss, because the gradients of several batches accumulate."""
    return 1.0 / trainer.accumulate_grad_batches


def expected_gradient(trainer: "pl.Trainer", loss_scale: Tensor | None) -> float | Tensor:
    """The gradient that Lightning's backward will send into the loss that `training_step` returns.

    With a loss scale a tensor in fp64: whatever dtype the loss has, rounding it there gives what Lightning computes.
    """
    return share_of_step(trainer) if loss_scale is None else loss_scale.double() / trainer.accumulate_grad_batches


def logged_step(trainer: "pl.Trainer") -> int:
    """The number that loggers get as the step of the batch that ends now, for Lightning's own metrics too."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def step_name(trainer: "pl.Trainer") -> str:
    """The name of the user's step that runs."""
    if trainer.training:
        return "training_step"
    return "test_step" if trainer.testing else "predict_step" if trainer.predicting else "validation_step"


def place_in_run(trainer: "pl.Trainer") -> str:
    """Where the Trainer is, as "step 12 (training)", for reports. For any thread."""
    stage = trainer.state.stage
    name = "set-up" if stage is None else stage.name.lower().replace("_", " ")
    return f"step {trainer.global_step} ({name})" if trainer.state.fn == TrainerFn.FITTING else name


OnGradients = Callable[[Optimizer, Callable[[], object]], object]
OnUnscaled = Callable[[Optimizer, Tensor, Tensor], object]


def loss_scale(trainer: "pl.Trainer") -> Tensor | None:
    """The plugin's factor for losses before their backward, on the device, in fp32; None: it has none."""
    scaler = _scaler_of(trainer.precision_plugin)
    return None if scaler is None else scaler.scale(torch.ones((), device=trainer.strategy.root_device))


def call_before_steps(
    plugin: Precision, attributes: TemporaryAttributes, on_gradients: OnGradients, on_unscaled: OnUnscaled
) -> None:
    """Until `attributes` are restored, let the ranks agree on infinite gradients, and call these functions.

    Args:
        plugin: the Trainer's.
        attributes: restore the changes.
        on_gradients: called after hooks with a function that clips, if the plugin has no scaler.
        on_unscaled: called by the scaler with all ranks' `found_inf`, and its scale.
    """
    scaler = _scaler_of(plugin)

    def unscale(own: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any) -> Any:
        """Called for fused optimizers, and on ranks without gradients, too.

        The scaler's own method returns `found_inf` for each device on which gradients are.
        """
        for found in own(optimizer, inv_scale, found_inf, *args).values():
            found_inf += found.to(found_inf.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        assert scaler is not None
        scale = available(scaler._get_scale_async(), "the scale exists once a loss was scaled")
        on_unscaled(optimizer, found_inf, scale)
        return {found_inf.device: found_inf}

    if scaler is not None:
        attributes.wrap(scaler, "_unscale_grads_", unscale)
        return

    def clip_gradients(
        clip: Callable[..., object], model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        on_gradients(optimizer, partial(clip, model, optimizer, *args, **kwargs))

    attributes.wrap(plugin, "_clip_gradients", clip_gradients)  # the last that is called before a step


def call_with_norm(plugin: Precision, attributes: TemporaryAttributes, on_norm: Callable[[Tensor], object]) -> None:
    """Until `attributes` are restored, call `on_norm` with each norm by which the Trainer clips gradients.

    Not if the plugin's class clips in its own way.
    """
    if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:

        def clip(_: object, optimizer: Optimizer, clip_val: float) -> None:
            on_norm(torch.nn.utils.clip_grad_norm_(plugin.main_params(optimizer), clip_val))

        attributes.wrap(plugin, "clip_grad_by_norm", clip)


def _scaler_of(plugin: Precision) -> GradScaler | None:
    """The plugin's gradient scaler, if it has one that is enabled."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def searches_rate(trainer: "pl.Trainer") -> bool:
    """Whether `Tuner.lr_find` or `LearningRateFinder` trains now, at rates up to those at which losses are NaN."""
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def options_now(trainer: "pl.Trainer") -> list[Any]:
    """The numbers among the optimizers' options, and how far their schedulers are, as a step might change them."""
    groups = [group for optimizer in trainer.optimizers for group in unwrapped(optimizer).param_groups]
    options = [{name: value for name, value in group.items() if isinstance(value, (int, float))} for group in groups]
    return [*options, *(getattr(one.scheduler, "last_epoch", None) for one in trainer.lr_scheduler_configs)]


def check_options(trainer: "pl.Trainer", before: list[Any]) -> None:
    """Check that the steps of a batch have changed no options of optimizers, and no schedulers.

    Raises:
        UnsupportedError: they have.
    """
    if options_now(trainer) != before:
        raise UnsupportedError(
            "training_step changes an optimizer's options, or steps a scheduler. It runs for each micro-batch, on "
            "pipeline rank 0 alone: do that in on_train_batch_start, or return the scheduler with {'interval': 'step'}."
        )


@contextmanager
def refusing_steps(trainer: "pl.Trainer") -> Iterator[None]:
    """Refuse that user code steps the trainer's optimizers. For steps of micro-batches, which run more than once.

    Raises:
        UnsupportedError: when one of them steps; others, such as those of an inner loop, may.
    """
    refused = {id(unwrapped(optimizer)) for optimizer in trainer.optimizers}

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in refused:
            raise UnsupportedError(
                "training_step steps an optimizer, but runs for each micro-batch, on pipeline rank 0 alone. Leave that "
                "to the Trainer, or train on one pipeline rank with automatic_optimization = False."
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def move_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the optimizers' states, except those that some (Adagrad) make for placeholders when constructed."""
    for optimizer in optimizers:
        placeholders = {p: optimizer.state.pop(p) for p in list(optimizer.state) if p.is_meta}
        _optimizer_to_device(optimizer, device)
        optimizer.state.update(placeholders)


def unguard_states(optimizers: Sequence[Optimizer], shard: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
    """Make the states plain tensors that some (Adagrad) have made of guarded parameters when constructed.

    `shard` gives this rank's part of a state that was made of a whole parameter; None: none are parts.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            plain = {name: _plain(value) for name, value in state.items()}
            if shard is not None:
                plain = {n: shard(v, parameter) if isinstance(v, Tensor) else v for n, v in plain.items()}
            state.update(plain)


def _plain(value: Any) -> Any:
    if not isinstance(value, PartialValues | MissingValues):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def forward_flops(module: "pl.LightningModule") -> int:
    """The FLOPs of a forward of `example_input_array`; 0 if it depends on more than shapes.

    torch counts products of matrices, convolutions and attention. Nothing is computed.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ModelSummary(whole_on_meta(module), max_depth=0).total_flops
    except Exception:  # the user's forward, with tensors that have no values
        return 0


_BACKWARD = 2
"""FLOPs of a backward, in forwards: the gradients of both operands of each product"""


def step_flops(
    module: "pl.LightningModule", given: float | None, num_samples: Callable[[Any], int]
) -> tuple[Callable[[Any], float], str]:
    """The FLOPs of forward and backward of one data rank's batch, and a line about their source.

    They are the number given here, or as `module.flops_per_batch`, else counted with `example_input_array`, in
    proportion to the samples of a batch and of the example, which `num_samples` returns; 0 where they aren't known.
    """
    if given is None:
        given = getattr(module, "flops_per_batch", None)
    if given is not None:
        number = float(given)
        return lambda _: number, f"{number:.3g} per batch of a data rank, as given"
    example = module.example_input_array
    samples = 0 if example is None else num_samples(example)
    forward = forward_flops(module) if samples else 0
    if not forward:
        advice = "whose forward must depend on shapes alone, or WaveReport(flops_per_batch=...)"
        return lambda _: 0.0, f"not known, so no FLOP/s: set example_input_array of the module, {advice}"
    per_sample = (1 + _BACKWARD) * forward / samples
    said = f"{per_sample:.3g} per sample: 3 times a forward of example_input_array"
    return lambda batch: per_sample * num_samples(batch), said


def peak_flops(trainer: "pl.Trainer") -> int | None:
    """FLOP/s of this rank's device at the run's precision; None if Lightning doesn't know the chip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_available_flops(trainer.strategy.root_device, _plugin_to_compute_dtype(trainer.precision_plugin))


_WHOLE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""weak references to copies of modules from before they were cut: a copy leads to the Trainer, and so to its module"""


def _whole_of(module: Any) -> Any:
    found = _WHOLE.get(module)
    return None if found is None else found()


def keep_whole(module: "pl.LightningModule", *, is_cut: bool, cuts: bool) -> object:
    """From now on, summaries of `module` show it as it is now, whole. Called before a run cuts or converts it.

    `is_cut`: an earlier run has; `cuts`: this run will. If it won't, summaries show the module itself.

    Returns:
        The copy, which is shown for as long as it is referenced.
    """
    if not cuts:
        _WHOLE.pop(module, None)
    elif _whole_of(module) is None or not is_cut:  # a copy of a module that was cut has the whole shapes of a pipeline
        whole = _on_meta(module)
        _WHOLE[module] = ref(whole)
        if not hasattr(ModelSummary.summarize, "__wrapped__"):
            ModelSummary.summarize = _summarizing_whole(ModelSummary.summarize)  # type: ignore[assignment,method-assign]
    return _whole_of(module)


def whole_on_meta(module: "pl.LightningModule") -> Any:
    """The whole module with all tensors on the meta device; of one that is cut, the copy that summaries show."""
    whole = _whole_of(module)
    if whole is None:
        return _on_meta(module)
    _follow(whole, module)
    return whole


def _on_meta(module: "pl.LightningModule") -> Any:
    whole: Any = MetaCopy(module).modules[""]
    vars(whole)["_device"] = torch.device("meta")  # where it expects its batches
    return whole


def _summarizing_whole(plain: Callable[[ModelSummary], Any]) -> Callable[[ModelSummary], Any]:
    """`ModelSummary.summarize`, which turns to the whole copy of a module that was cut."""

    @wraps(plain)
    def summarize(summary: ModelSummary) -> Any:
        module = summary._model
        whole = _whole_of(module)
        if whole is None:
            return plain(summary)
        summary._model = whole
        _follow(whole, module)
        try:
            with torch.device("meta"):
                return plain(summary)
        except Exception as error:
            _follow(whole, module)  # the failed forward has left it in eval mode
            reason = "forward depends on more than the shapes of example_input_array"
            rank_zero_warn(f"The model summary shows no sizes and FLOPs: {reason}, and the model is cut: {error!r}")
            vars(summary)["_forward_example_input"] = lambda: None
            return plain(summary)

    return summarize


def _follow(whole: "pl.LightningModule", module: "pl.LightningModule") -> None:
    """Take over changes since the copy was made: modes, which parameters are trained, and the Trainer."""
    vars(whole)["_trainer"] = vars(module)["_trainer"]
    modules, parameters = dict(whole.named_modules()), dict(whole.named_parameters())
    for name, part in module.named_modules():
        if name in modules:
            modules[name].training = part.training
    for name, parameter in module.named_parameters():
        if name in parameters:
            parameters[name].requires_grad_(parameter.requires_grad)


def record_all_threads(module: "pl.LightningModule") -> None:
    """Let the profiler of the module's Trainer record all threads, unless the user has set its `experimental_config`.

    Called before the profiler starts. By default torch records the thread that starts it.
    """
    trainer = vars(module).get("_trainer")
    if trainer is not None and (profiler := _profiler_of(trainer)) is not None:
        profiler._profiler_kwargs.setdefault("experimental_config", _ExperimentalConfig(profile_all_threads=True))


def follow_steps(trainer: "pl.Trainer", stack: Stack, attributes: TemporaryAttributes) -> None:
    """Let the profiler name modules in steps that overlap, and the blocks of a cut stack where they really run.

    A step only records its calls of the blocks, so Lightning's hooks on them would time something else.
    """
    profiler = _profiler_of(trainer)
    register = None if profiler is None else profiler._register
    if register is None:
        return
    register._records = _RecordsByThread()
    for name, block in zip(stack.block_names, stack.blocks, strict=True):
        for handle in register._handles.pop(name, ()):
            handle.remove()
        attributes.set(block, RANGE, f"[pl][module]{type(block).__module__}.{type(block).__name__}: {name}")


class _RecordsByThread(dict[str, Any]):
    """The ranges that are open, by name, in the calling thread: several steps are in a module at the same time."""

    def __setitem__(self, name: str, record: Any) -> None:
        super().__setitem__(self._key(name), record)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._key(name))

    @staticmethod
    def _key(name: str) -> str:
        return f"{threading.get_ident()} {name}"


def _profiler_of(trainer: "pl.Trainer") -> PyTorchProfiler | None:
    profiler = vars(trainer)["profiler"]  # a function of Lightning's sets it
    return profiler if isinstance(profiler, PyTorchProfiler) else None


def describe_run(trainer: "pl.Trainer", layout: Layout, ownership: Ownership, topology: Topology, fullest: int) -> str:
    """Five lines for the user, at the start of a training whose model is cut.

    Args:
        trainer: whose training loader is known.
        layout: of the pipeline.
        ownership: which stage has which blocks.
        topology: of all ranks.
        fullest: bytes of weights and gradients on the rank that holds the most.
    """
    stack, cube = ownership.stack, "x".join(map(str, topology.cube))
    parts = f"{counted(layout.num_stages, 'stage')} on {counted(topology.pipe, 'pipeline rank')}"
    parts += f" in a {cube} cube" if topology.cube != (1, 1, 1) else ""
    waves = f", {counted(layout.num_waves, 'wave')}" if layout.num_waves else ""
    count = min(layout.num_microbatches, batch_size(trainer) or layout.num_microbatches)
    bubble = layout.predict(count)
    many = counted(count, "micro-batch")
    once = ". The step runs once a batch: all micro-batches' activations are held" if layout.runs_step_once else ""
    if count < layout.num_microbatches:
        many += ", as many as a batch has samples"
    return (
        f"{stack.name}: {counted(len(stack), 'block')}, {parts}, x {topology.data} data = "
        f"{counted(topology.world_size, 'rank')}\n"
        f"  schedule        {layout.schedule}{waves}, {many}: predicted bubble {bubble:.0%}{once}\n"
        f"  samples         {_samples(trainer, topology)}\n"
        f"  learning rates  scale with trainer.strategy.data_parallel_size ({topology.data}), not trainer.world_size\n"
        f"  memory          {bytes_of(fullest)} of weights and gradients on the fullest rank"
    )


def held_bytes(module: nn.Module) -> int:
    """Bytes of this rank's parameters and of the gradients that they will have."""
    own = [one for one in module.parameters() if not one.is_meta]
    return sum(one.numel() * one.element_size() * (1 + one.requires_grad) for one in own)


def samples_per_rank(trainer: "pl.Trainer") -> int | None:
    """How many samples of each data rank make an optimizer step, where the loader tells."""
    batch = batch_size(trainer)
    return None if batch is None else batch * trainer.accumulate_grad_batches


def _samples(trainer: "pl.Trainer", topology: Topology) -> str:
    of_rank, accumulated, data = samples_per_rank(trainer), trainer.accumulate_grad_batches, topology.data
    if of_rank is None:
        per_step = accumulated * data
        count = "one batch" if per_step == 1 else f"{per_step} batches"
        return f"a step takes {count} of the loader; ddp would take {accumulated * topology.world_size}"
    return (
        f"a step takes {of_rank * data}, {of_rank} for each data rank; ddp would take {of_rank * topology.world_size}"
    )


def count_batches_once(trainer: "pl.Trainer", topology: Topology) -> None:
    """Let totals be over data ranks, and a "device" be all ranks that hold one copy of the model.

    Lightning multiplies rank 0's batches by the number of ranks, but only the data ranks see different batches.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                throughput.world_size = topology.data
                if callback.available_flops is not None:
                    throughput.available_flops = callback.available_flops * topology.replica_size
