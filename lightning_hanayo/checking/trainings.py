"""Runs a function as the ranks of a run, in processes of its own, which leave nothing behind.

On Linux they are forks of this process, as in Lightning's launcher for notebooks: they need neither a main module that
can be imported again nor a module that can be pickled. They compute on the CPU with one thread. Elsewhere they are
spawned.

Trains on the layout: one rank of it, and what all ranks together have left.

One rank of a run: its random numbers, its precision, its Trainer; and its errors as values that can be returned.

Prepares a copy of the user's module for a run: fewer blocks, another precision, dropout switched off.

Copies what a run leaves, by name: losses, gradients, weights, buffers and logged values of each optimizer step.

Trains whole batches in one process, with a plain Trainer, which knows nothing of the strategy.

batches     of data rank 0 | of data rank 1      the step runs once for each; data rank 0's logs and buffers are kept
loss        the sum of their losses, weighed as the strategy weighs them
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, default_collate

from lightning_hanayo.checking.case import Case, RankFailure, RankResult
from lightning_hanayo.checking.comparison import Key, Kind, Values
from lightning_hanayo.errors import HanayoError, PeerFailed, UnsupportedError
from lightning_hanayo.notebook import RankProcess, Ranks
from lightning_hanayo.partition.deferred_init import DeferredInit, is_deferred
from lightning_hanayo.partition.stack import find_stack, modules_outside
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import user_line
from lightning_hanayo.seeds import seed_of
from lightning_hanayo.strategy import HanayoStrategy
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.lightning.loaders import source_of
from lightning_hanayo.strategy.lightning.state import DefaultDtype, batch_idx, batch_key
from lightning_hanayo.strategy.lightning.user_hooks import defines_configure_model
from lightning_hanayo.strategy.losses import LossWeight, LossWeighting, for_model
from lightning_hanayo.strategy.setup.values import fill_initial_values, load_pretrained, plan_pretrained
from lightning_hanayo.strategy.user_code.collected import Collections
from lightning_hanayo.topology import Topology

PLATFORM = sys.platform
GRACE = 15.0
"""seconds for the other ranks to end after one has failed; the strategy ends them after 5"""


def run(world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """The results of `function(*arguments)`, a function of a module, on `world_size` ranks; or a `RankFailure` of each.

    Each rank finds MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE and NODE_RANK in its environment. What it
    prints is shown only if it dies. After `timeout` seconds all ranks are killed.
    """
    forks = PLATFORM == "linux" and not torch.cuda.is_initialized()  # a fork could not use the parent's GPUs
    with Ranks(GRACE, timeout=timeout) as ranks:
        work = partial(function, *arguments)
        ranks.start(world_size, work, method="fork" if forks else "spawn", failure=RankFailure)
        ranks.follow()
        return [_result(one, timeout) for one in ranks.all]


def _result(one: RankProcess, timeout: float) -> Any:
    kind, value = one.answer
    if kind == "result":
        return value
    if kind:
        return RankFailure(one.rank, type(value).__name__, str(value), str(value.__cause__).strip('\n"'))
    if one.process.is_alive():
        return RankFailure(one.rank, "timed out", f"no answer within {timeout:g} s", one.printed)
    return RankFailure(one.rank, "died", f"the process ended with exit code {one.process.exitcode}", one.printed)


def rank_of_run(function: Callable[..., RankResult]) -> Callable[..., RankResult | RankFailure]:
    """Let a function of a `Case` run as a rank: seeded, in the case's precision, and without raising."""

    @wraps(function)
    def run(case: Case, *arguments: Any) -> RankResult | RankFailure:
        try:
            with DefaultDtype(case.dtype), warnings.catch_warnings(record=True) as caught:
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
    if case.depth is not None and len(find_stack(module, case.options.stack)) != case.depth:
        shrink(module, case.options.stack, case.depth)
    if not case.has_dropout:
        switch_dropout_off(module)
    module.double() if case.dtype == torch.float64 else module.to(case.dtype)
    if not whole:
        return
    # what all ranks of a layout together get
    deferred = DeferredInit(module, case.seed) if is_deferred(module) else None
    if case.options.init_folders:
        plans = plan_pretrained(module, find_stack(module, case.options.stack).name, case.options.init_folders)
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


class StepWatch(TorchDispatchMode):
    """While it is active: whether user code rounds a tensor of `dtype` to a lower precision, as norms of Llama do, and
    which of its lines draws random numbers first."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.has_rounded = False
        self.draws_at = ""
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        may_draw = not self.draws_at and torch.Tag.nondeterministic_seeded in func.tags
        before = torch.get_rng_state() if may_draw else None
        result = func(*args, **(kwargs or {}))
        if before is not None and not torch.equal(torch.get_rng_state(), before):
            self.draws_at = user_line()
        if func is torch.ops.aten._to_copy.default and isinstance(result, Tensor) and result.is_floating_point():
            self.has_rounded |= args[0].dtype == self._dtype and result.itemsize < args[0].itemsize
        return result


@rank_of_run
def run_reference(case: Case) -> RankResult:
    """Train in this process."""
    module = prepare(case, whole=True)
    steps = _WholeSteps(case)
    accumulate, num_data = case.trainer.accumulate_grad_batches, case.topology.data
    observer = Observer(lambda _: dict(enumerate(steps.losses)), accumulate, num_data, logs=True)
    make_trainer(case, steps, observer, devices=1).fit(module, make_loader(case, 0))
    values = {key: value for key, value in observer.values.items() if key.name.partition(" (")[0] not in steps.synced}
    return RankResult(values, draws_at=steps.draws_at, has_rounded=steps.watch.has_rounded)


def weigh(rows: Sequence[SplitBatch], rule: LossWeight) -> list[float]:
    """The weights of the data ranks' batches, which sum to 1.

    By samples (and for sums) every data rank counts the same, otherwise by what it has.
    """
    if rule in ("samples", "sum"):
        return [1 / len(rows)] * len(rows)
    weighting = LossWeighting(rule, 1, None)
    return list(weighting.for_training([row.pieces[0] for row in rows], rows[0].sizes).in_gradient)


class _WholeSteps(Callback):
    """Replaces the module's step by one that runs it on the batches of all data ranks, one after another."""

    def __init__(self, case: Case) -> None:
        self.losses: list[Tensor] = []
        """of the last batch, by data rank"""
        self.synced: set[str] = set()
        """names of logged values that data ranks merge, which aren't compared"""
        self.draws_at = ""
        """the line of a step that draws random numbers"""
        self.watch = StepWatch(case.dtype)
        self._case = case
        self._splitter = BatchSplitter(case.options.batch_rule)
        self._data_rank = 0
        """whose batch the step runs on"""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The module is built now."""
        options, num_data = self._case.options, self._case.topology.data
        rule: LossWeight = "samples" if options.loss_weight == "auto" else options.loss_weight
        rule = for_model(rule, pl_module, options.batch_dim)
        stack = find_stack(pl_module, options.stack)
        self._collections = Collections(pl_module, modules_outside(pl_module, stack))
        self._log = pl_module.log
        step = pl_module.training_step

        @wraps(step)
        def training_step(batch: Any, *arguments: Any, **keywords: Any) -> Any:
            batches = [batch]
            for data_rank in range(1, num_data):  # the batches of others, on their way through the module's hooks
                other = self._case.batches_of(data_rank)[batch_idx(trainer)]
                other = trainer.lightning_module.on_before_batch_transfer(other, 0)
                batches.append(trainer.strategy.batch_to_device(other, dataloader_idx=0))
            source = source_of(trainer)
            weights = weigh([self._splitter.split(one, 1, source) for one in batches], rule)
            buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()} if num_data > 1 else {}
            results = []
            for data_rank, one in enumerate(batches):
                with _buffers(pl_module, buffers) if data_rank else nullcontext():
                    results.append(self._run(trainer, data_rank, partial(step, one, *arguments, **keywords)))
            losses = [_loss_of(result) for result in results]
            self.losses = [loss.detach() for loss in losses]
            # with weight 0 not even a NaN counts: the mean over no tokens is one
            counted = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
            total = torch.stack([one.reshape(()) for one in counted]).sum() if counted else losses[0] * 0.0
            return {**results[0], "loss": total} if isinstance(results[0], Mapping) else total

        object.__setattr__(pl_module, "training_step", training_step)
        object.__setattr__(pl_module, "log", self._keep_log)

    def _run(self, trainer: pl.Trainer, data_rank: int, step: Callable[[], Any]) -> Any:
        """Run the step on a data rank's batch."""
        self._data_rank = data_rank
        before = torch.get_rng_state()
        if self._case.topology.world_size > 1:  # the numbers that a layout draws if its step runs on the whole batch
            torch.default_generator.manual_seed(seed_of(self._case.seed, data_rank, batch_key(trainer), 0))
        begun = torch.get_rng_state()
        if data_rank:
            self._collections.begin_batch()
            self._collections.enter(0)
        with nullcontext() if self.losses else self.watch:  # in the first batch alone: a watch takes time
            result = step()
        if data_rank:  # the module holds data rank 0's
            self._collections.store({path: [] for own in self._collections.end_batch(1) for path in own.appended}, {})
        if not torch.equal(torch.get_rng_state(), begun):
            self.draws_at = self.draws_at or self.watch.draws_at or "the step"
        if self._case.topology.world_size > 1:
            torch.set_rng_state(before)
        self._data_rank = 0
        return result

    def _keep_log(self, name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
        """Log data rank 0's values alone."""
        if keywords.get("sync_dist") and self._case.topology.data > 1:
            self.synced |= {name, f"{name}_step", f"{name}_epoch"}
        if not self._data_rank:
            self._log(name, value, *arguments, **keywords)


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        expected = "a check needs a loss of every batch, a tensor or a dictionary with the key 'loss'"
        raise UnsupportedError(f"training_step returned {type(loss).__name__}: {expected}")
    return loss


@contextmanager
def _buffers(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the module has copies of these buffers: another data rank's, which begins each batch with rank 0's.

    They are exchanged: the backward may need those of another data rank as they were.
    """
    own = dict(module.named_buffers())
    _assign(module, {name: buffer.clone() for name, buffer in values.items()})
    yield
    _assign(module, own)


def _assign(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in values.items():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._buffers[last] = buffer
