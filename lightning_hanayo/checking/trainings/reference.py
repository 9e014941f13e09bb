"""Trains whole batches in one process, with a plain Trainer, which knows nothing of the strategy.

batches     of data rank 0 | of data rank 1      the step runs once for each; data rank 0's logs and buffers are kept
loss        the sum of their losses, weighed as the strategy weighs them
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hanayo.checking.case import Case, RankResult
from lightning_hanayo.checking.trainings.layout import Observer, make_loader, make_trainer, prepare, rank_of_run
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.stack import find_stack, modules_outside
from lightning_hanayo.pipeline_parallel.capture.proxy import user_line
from lightning_hanayo.seeds import seed_of
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.lightning.loaders import source_of
from lightning_hanayo.strategy.lightning.state import batch_idx, batch_key
from lightning_hanayo.strategy.losses.loss_weight import LossWeight, LossWeighting, for_model
from lightning_hanayo.strategy.user_code.collected import Collections


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
        stack = find_stack(pl_module, options.blocks)
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
