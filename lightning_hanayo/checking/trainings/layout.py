"""Trains on the layout: one rank of it, and what all ranks together have left.

One rank of a run: its random numbers, its precision, its Trainer; and its errors as values that can be returned.

Prepares a copy of the user's module for a run: fewer blocks, another precision, dropout switched off.

Copies what a run leaves, by name: losses, gradients, weights, buffers and logged values of each optimizer step.
"""

import os
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from lightning_hanayo.checking.case import Case, RankFailure, RankResult
from lightning_hanayo.checking.comparison import Key, Kind, Values
from lightning_hanayo.errors import HanayoError, PeerFailed
from lightning_hanayo.partition.deferred_init import DeferredInit, is_deferred
from lightning_hanayo.partition.stack import find_stack
from lightning_hanayo.strategy import HanayoStrategy
from lightning_hanayo.strategy.lightning.user_hooks import defines_configure_model
from lightning_hanayo.strategy.setup.values import fill_initial_values, load_pretrained, plan_pretrained
from lightning_hanayo.topology import Topology


def rank_of_run(function: Callable[..., RankResult]) -> Callable[..., RankResult | RankFailure]:
    """Let a function of a `Case` run as a rank: seeded, in the case's precision, and without raising."""

    @wraps(function)
    def run(case: Case, *arguments: Any) -> RankResult | RankFailure:
        try:
            with _DtypeContextManager(case.dtype), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                seed_everything(case.seed, verbose=False)
                result = function(case, *arguments)
        except (Exception, SystemExit) as error:
            return _failure(error)
        texts = dict.fromkeys(str(one.message) for one in caught)
        result.warnings = tuple(text for text in texts if "micro-batch" in text)  # the strategy's, not Lightning's
        return result

    return run


def make_trainer(case: Case, *observers: Callback, **options: Any) -> Trainer:
    """A Trainer on CPUs, without output, that trains as many steps as the case has.

    The user's callbacks come before the `observers`.
    """
    callbacks = [*case.trainer.callbacks, _LenientSchedulers(), *observers]
    output = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options |= vars(case.trainer) | {"callbacks": callbacks} | dict.fromkeys(output, False)
    options |= {"use_distributed_sampler": False, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    return Trainer(accelerator="cpu", max_steps=case.steps, max_epochs=1, plugins=LightningEnvironment(), **options)


def make_loader(case: Case, data_rank: int) -> Any:
    """A loader of the data rank's batches, as they are; or several, as the user has."""
    return _loaders(case.batches_of(data_rank), case.loaders, case.are_collated)


def _loaders(batches: Sequence[Any], shape: Any, are_collated: bool) -> Any:
    if isinstance(shape, dict):
        return {key: _loaders([batch[key] for batch in batches], inner, are_collated) for key, inner in shape.items()}
    if isinstance(shape, list):
        return [_loaders([batch[i] for batch in batches], inner, are_collated) for i, inner in enumerate(shape)]
    return _BatchLoader(batches, batch_size=None, collate_fn=default_collate if are_collated else list)  # type: ignore[arg-type]


class _BatchLoader(DataLoader[Any]):
    """Gives batches as they are. Its `collate_fn` has made them: the strategy reads it, and nothing calls it."""

    def __iter__(self) -> Any:
        return iter(self.dataset)


class _LenientSchedulers(Callback):
    """Lets schedulers skip what they monitor: a check doesn't validate."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            config.strict = False


def _failure(error: BaseException) -> RankFailure:
    is_refusal, is_consequence = isinstance(error, HanayoError), isinstance(error, PeerFailed)
    rank, trace = int(os.environ.get("RANK", 0)), "".join(traceback.format_exception(error))
    return RankFailure(rank, type(error).__name__, str(error), trace, is_refusal, is_consequence)


_OF_ALL_DATA_RANKS = ("gradient", "weight")
"""what the data ranks must agree on; losses have their number in their name, buffers and logs are data rank 0's"""


@rank_of_run
def run_rank(case: Case) -> RankResult:
    """Train as the rank that the environment names. Called by all ranks of the case's topology."""
    topology = case.topology
    data_rank, pipe_rank, *cube = topology.coordinates(int(os.environ["RANK"]))
    is_first = not any((pipe_rank, *cube))
    module = prepare(case, whole=False)
    accumulate = case.trainer.accumulate_grad_batches

    def losses(outputs: Any) -> Mapping[int, Tensor]:  # Lightning has divided them by the number of batches
        return {data_rank: outputs["loss"] * accumulate} if is_first else {}

    observer = Observer(losses, accumulate, topology.data, logs=is_first)
    sizes = {"pipeline_parallel_size": topology.pipe, "data_parallel_size": topology.data, "cube": topology.cube}
    strategy = HanayoStrategy(**vars(case.options) | sizes)
    trainer = make_trainer(case, observer, devices=topology.world_size, strategy=strategy)
    trainer.fit(module, make_loader(case, data_rank))
    pipeline = strategy.pipeline
    ownership = pipeline.ownership
    return RankResult(
        observer.values,
        stack=ownership.stack.name,
        stages=tuple(zip(ownership.stages, ownership.stage_ranks, strict=False)),
        block_names=ownership.stack.block_names,
        num_microbatches=pipeline.layout.num_microbatches,
    )


def merge(ranks: Sequence[RankResult], topology: Topology) -> list[Values]:
    """The values of each data rank, merged over its pipeline ranks. All ranks of a cube have the same: the first's.

    A value that several pipeline ranks have, such as a buffer outside the stack, is the first one's, which runs it.
    """
    merged: list[Values] = []
    for replica in topology.groups("pipe", "x", "y", "z"):
        owners = [rank for rank in replica if not any(topology.coordinates(rank)[2:])]
        values: Values = {}
        for rank in reversed(owners):
            values |= ranks[rank].values
        merged.append(values)
    for other in merged[1:]:
        merged[0].update({key: value for key, value in other.items() if key.kind == "loss"})
    return [merged[0], *({k: v for k, v in other.items() if k.kind in _OF_ALL_DATA_RANKS} for other in merged[1:])]


_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth")
"""attributes of a module or its config that say how many blocks there are"""


def prepare(case: Case, *, whole: bool) -> pl.LightningModule:
    """Prepare the case's module in place: now, or as soon as its `configure_model` has built it.

    With `whole`, a module that was built on the meta device gets the values that the ranks of a layout give it.
    """
    module = case.module
    if defines_configure_model(module):
        on_meta = bool(case.options.init_folders)  # as with the strategy
        _after_configure_model(module, lambda: _prepare(module, case, whole), on_meta=on_meta)
    else:
        _prepare(module, case, whole)
    return module


def shrink(module: nn.Module, blocks: str | None, depth: int) -> None:
    """Keep the first `depth` blocks of the stack, and correct the counts of them in configs and modules around it.

    Raises:
        HanayoError: there are fewer, or less than two are left.
    """
    stack = find_stack(module, blocks)
    before = len(stack)
    if not 2 <= depth <= before:  # a single module isn't found as a stack
        raise HanayoError(f"depth={depth}: expected 2 to {before}, the blocks of {stack.name}")
    path = stack.block_names[0].split(".")[:-1]
    for name in reversed(stack.block_names[depth:]):
        container, _, key = name.rpartition(".")
        parent: Any = module.get_submodule(container)
        if not isinstance(parent, nn.ModuleList | nn.Sequential):
            raise HanayoError(f"depth={depth}: the step calls {name} by its name. Leave depth out")
        del parent[list(parent._modules).index(key)]
    for length in range(len(path)):
        _correct_counts(module.get_submodule(".".join(path[:length])), before, depth)


def switch_dropout_off(module: nn.Module) -> bool:
    """Set the probabilities of all dropout to zero; returns whether any was positive.

    They are `p` of torch's dropout modules, and every number between 0 and 1 whose name contains "drop", also of what a
    module has as its `config`.
    """
    found = False
    configs = {id(one): one for part in module.modules() if hasattr(one := getattr(part, "config", None), "__dict__")}
    for part in (*module.modules(), *configs.values()):
        is_dropout = isinstance(part, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(part).items()):
            named_so = "drop" in name or (is_dropout and name == "p")
            if named_so and isinstance(value, float) and 0.0 < value <= 1.0:
                setattr(part, name, 0.0)
                found = True
    return found


def _prepare(module: pl.LightningModule, case: Case, whole: bool) -> None:
    if case.depth is not None and len(find_stack(module, case.options.blocks)) != case.depth:
        shrink(module, case.options.blocks, case.depth)
    if not case.has_dropout:
        switch_dropout_off(module)
    module.double() if case.dtype == torch.float64 else module.to(case.dtype)
    if not whole:
        return
    # what all ranks of a layout together get
    deferred = DeferredInit(module, case.seed) if is_deferred(module) else None
    if case.options.init_folders:
        plans = plan_pretrained(module, find_stack(module, case.options.blocks).name, case.options.init_folders)
        load_pretrained(plans, module, module.modules(), deferred, torch.device("cpu"), None)
    if deferred is not None:
        fill_initial_values(deferred, module.modules(), torch.device("cpu"), None)


def _after_configure_model(module: pl.LightningModule, then: Callable[[], None], *, on_meta: bool) -> None:
    configure = module.configure_model

    @wraps(configure)
    def configure_model() -> None:
        with torch.device("meta") if on_meta else nullcontext():
            configure()
        then()

    object.__setattr__(module, "configure_model", configure_model)


def _correct_counts(module: nn.Module, before: int, after: int) -> None:
    for holder in (module, getattr(module, "config", None)):
        values = getattr(holder, "__dict__", {})
        for name, value in list(values.items()):
            if name in _COUNTS and value == before:
                setattr(holder, name, after)
            elif holder is not module and isinstance(value, list) and len(value) == before:
                setattr(holder, name, value[:after])  # one entry per block, as the types of attention of Gemma


Losses = Callable[[Any], Mapping[int, Tensor]]
"""The losses of a batch, by data rank, from what its `training_step` has returned; empty where this rank has none."""


class Observer(Callback):
    """The last callback of a run. In a cube, whose ranks hold shards, all of its ranks gather them here.

    Args:
        losses: gives the losses of a batch.
        accumulate: the batches of one optimizer step.
        num_data: D, data ranks.
        logs: whether this rank's logged values count.
    """

    def __init__(self, losses: Losses, accumulate: int, num_data: int, *, logs: bool) -> None:
        self.values: Values = {}
        self._losses = losses
        self._accumulate = accumulate
        self._num_data = num_data
        self._logs = logs

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Before clipping, and before the module's own hook."""
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad and not parameter.is_meta:
                self._keep(trainer.global_step, "gradient", name, _whole_gradient(trainer, parameter))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the optimizer's step, if there was one."""
        step, place = divmod(batch_idx, self._accumulate)
        for data_rank, loss in self._losses(outputs).items():
            of_rank = f", data rank {data_rank}" if self._num_data > 1 else ""
            self._keep(step, "loss", f"batch {batch_idx}{of_rank}", loss)
        if self._logs:
            self._keep_logs(trainer, step, f"batch {batch_idx}")
        if place == self._accumulate - 1:
            if (session := _session(trainer)) is not None:
                session.finish_gather()
            for name, parameter in pl_module.named_parameters():
                if not parameter.is_meta:
                    self._keep(step, "weight", name, _whole(trainer, parameter, parameter))
            for name, buffer in pl_module.named_buffers():
                if not buffer.is_meta:
                    self._keep(step, "buffer", name, buffer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The means over the epoch."""
        if self._logs:
            self._keep_logs(trainer, trainer.global_step - 1, "epoch")

    def _keep_logs(self, trainer: pl.Trainer, step: int, when: str) -> None:
        for name, value in trainer.callback_metrics.items():
            self._keep(step, "log", f"{name} ({when})", value)

    def _keep(self, step: int, kind: Kind, name: str, value: Tensor) -> None:
        self.values[Key(step, kind, name)] = value.detach().cpu().clone()


def _session(trainer: pl.Trainer) -> Any:
    return getattr(trainer.strategy, "session", None)


def _whole_gradient(trainer: pl.Trainer, parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient; gathered from the data ranks, too, if each has the sums of its own rows alone."""
    if parameter.grad is None:
        return _whole(trainer, torch.zeros_like(parameter), parameter)
    shards = None if (session := _session(trainer)) is None else session.steps.shards
    if shards is None or not shards.scatters or parameter not in shards:
        return _whole(trainer, parameter.grad, parameter)
    whole: Tensor = shards.unshard(shards.own_rows(parameter, parameter.grad), parameter)
    return whole


def _whole(trainer: pl.Trainer, value: Tensor, parameter: nn.Parameter) -> Tensor:
    """The value of a parameter, or its gradient, gathered from the ranks of its cube if there is one."""
    session = _session(trainer)
    if session is None or session.cube is None:
        return value
    whole: Tensor = session.cube.unshard(value, parameter)
    return whole
