"""Trains in one process what the layout trains: with a plain Trainer, which knows nothing of the strategy.

whole batches     batch of data rank 0 | of data rank 1                     the step runs once for each
micro-batches     0 | 1 | 2 | 3 | 0 | 1 | 2 | 3                             the step runs once for each
loss              the sum of their losses, weighted as the strategy weighs them

It shares with the strategy what defines the micro-batches: how a batch is cut, what counts as a weight, and which key
each random number has.

Gives the steps of one process the random numbers that a layout draws: each stream is seeded by its key.

the step's own code    key: seed, data rank, batch, micro-batch
block i                key: the same and i, and from its second call on the number of earlier ones;
                       the step's own code draws one number at each call, and then continues

Keeps back what a step logs for its pieces, and logs one value for them all, as a layout does.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from lightning_hanayo.checking.case import Case, RankResult
from lightning_hanayo.checking.trainings.layout import Observer, make_loader, make_trainer, prepare, rank_of_run
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.stack import find_stack, modules_outside
from lightning_hanayo.pipeline_parallel.stages import detach_tree
from lightning_hanayo.seeds import mix, seed_of
from lightning_hanayo.strategy.batch_split import SplitBatch, WholeSplitter
from lightning_hanayo.strategy.lightning.loaders import source_of
from lightning_hanayo.strategy.lightning.state import batch_idx, batch_key
from lightning_hanayo.strategy.losses.loss_weight import LossWeight, LossWeighting, PieceWeights, for_model
from lightning_hanayo.strategy.run_batch import UserStep
from lightning_hanayo.strategy.user_code.collected import Collections, keep_collected


class KeyedRandom:
    """The random streams of one process.

    Args:
        seed: of the run.
        is_keyed: False: torch's generator is left as it is, as where nothing is cut.
    """

    def __init__(self, seed: int, *, is_keyed: bool) -> None:
        self.has_drawn = False
        """whether user code has drawn a number"""
        self._seed = seed
        self._is_keyed = is_keyed
        self._batch = ""
        self._microbatch = 0
        self._block_seeds: dict[int, int] = {}
        """by the number that was drawn at the block's call, so that a recomputed block finds its seed again"""
        self._num_calls: Counter[int] = Counter()
        """of each block, for the micro-batch under way"""
        self._callers: list[tuple[Tensor, Tensor]] = []
        """of each block under way: the state of its caller's stream, and with which its own has begun"""
        self._untouched = torch.Generator()
        """draws only what this class draws in the step's own stream"""

    def attach(self, blocks: tuple[nn.Module, ...]) -> None:
        """Give each block its own stream."""
        if not self._is_keyed:
            return
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, index=index: self._enter_block(index))
            block.register_forward_hook(lambda *_: self._leave_block(), always_call=True)

    @contextmanager
    def batch(self, key: str) -> Iterator[None]:
        """Inside, numbers are those of the batch that `key` names. Afterwards the generator is as it was before."""
        self._batch = key
        state = torch.get_rng_state()
        yield
        if self._is_keyed:
            torch.set_rng_state(state)

    def begin(self, data_rank: int, microbatch: int) -> None:
        """Start the stream of the step's own code for a micro-batch."""
        if self._is_keyed:
            self._microbatch = seed_of(self._seed, data_rank, self._batch, microbatch)
            torch.default_generator.manual_seed(self._microbatch)
        self._num_calls.clear()
        self._untouched.set_state(torch.get_rng_state())

    def end(self) -> None:
        """The step has ended."""
        self.has_drawn |= not torch.equal(torch.get_rng_state(), self._untouched.get_state())

    def _enter_block(self, index: int) -> None:
        number = int(torch.randint(1 << 62, ()))
        if number not in self._block_seeds:  # else the backward recomputes it
            torch.randint(1 << 62, (), generator=self._untouched)
            seed, call = mix(self._microbatch, index), self._num_calls[index]
            self._block_seeds[number] = mix(seed, call) if call else seed
            self._num_calls[index] += 1
        seed = self._block_seeds[number]
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        self._callers.append((state, torch.get_rng_state()))

    def _leave_block(self) -> None:
        state, first = self._callers.pop()
        self.has_drawn |= not torch.equal(torch.get_rng_state(), first)
        torch.set_rng_state(state)


_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("sum", torch.sum, sum), torch.sum),
    **dict.fromkeys(("max", torch.max, max), torch.amax),
    **dict.fromkeys(("min", torch.min, min), torch.amin),
}
"""by `reduce_fx`; all others are means"""


@dataclass
class _Logged:
    """What was logged under one name: `values[data rank]` has a pair (weight, value) for each micro-batch."""

    keywords: dict[str, Any]
    values: list[list[tuple[float, Any]]]
    batch_sizes: list[int]
    """of each data rank"""


class PiecewiseLog:
    """Takes the place of `module.log` while pieces run. Only data rank 0's values count, or with sync_dist all."""

    def __init__(self, module: pl.LightningModule, num_data: int) -> None:
        self._not_merged: set[str] = set()
        """what one call of `log` can't express: names in `trainer.callback_metrics`, and when they count"""
        self._log: Callable[..., None] = module.log
        self._num_data = num_data
        self._piece: tuple[int, float, int] | None = None
        self._logged: dict[str, _Logged] = {}
        self._sums: list[list[float]] = []
        object.__setattr__(module, "log", self._keep)

    def begin(self, data_rank: int, weight: float, num_samples: int) -> None:
        """A piece's step starts."""
        self._piece = data_rank, weight, num_samples

    def finish(self, sums: Sequence[Sequence[Tensor]] = ()) -> None:
        """All pieces are done: log. `sums`: their losses by data rank, if these are sums; logged, they are added up."""
        self._piece = None
        self._sums = [[float(loss) for loss in row] for row in sums]
        for name, logged in self._logged.items():
            self._log(name, self._merged(name, logged), **logged.keywords | {"batch_size": logged.batch_sizes[0] or 1})
        self._logged.clear()

    def means_of(self, data_rank: int, piece: int) -> list[Any]:
        """What the step has logged as means for a piece, of what it logs once for each."""
        means = (one for one in self._logged.values() if one.keywords.get("reduce_fx", "mean") not in _REDUCTIONS)
        rows = (one.values[data_rank] for one in means)
        return [row[piece][1] for row in rows if piece < len(row)]

    def has_merged(self, name: str) -> bool:
        """Whether a value, such as "train_loss (epoch)", is that of all pieces."""
        return f"{name.partition(' (')[0]} {'epoch' if name.endswith('(epoch)') else 'batch'}" not in self._not_merged

    def _keep(self, name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
        if self._piece is None or arguments:
            return self._log(name, value, *arguments, **keywords)
        data_rank, weight, num_samples = self._piece
        if name not in self._logged:
            self._logged[name] = _Logged(keywords, [[] for _ in range(self._num_data)], [0] * self._num_data)
        logged = self._logged[name]
        logged.values[data_rank].append((weight, value))
        logged.batch_sizes[data_rank] += keywords.get("batch_size") or num_samples
        return None

    def _merged(self, name: str, logged: _Logged) -> Any:
        first = next(value for row in logged.values for _, value in row)
        if isinstance(first, Metric):
            if sum(map(len, logged.values)) > 1:  # its value in a batch is that of the last piece
                self._not_merged |= {f"{name} batch", f"{name}_step batch"}
            return first
        if logged.keywords.get("sync_dist") and len(set(logged.batch_sizes)) > 1:  # each data rank has its own weight
            self._not_merged |= {f"{name} epoch", f"{name}_epoch epoch"}
        reduction = _REDUCTIONS.get(logged.keywords.get("reduce_fx", "mean"))
        rows = logged.values if logged.keywords.get("sync_dist") else logged.values[:1]
        is_sum = bool(self._sums) and [[float(value) for _, value in row] for row in rows] == self._sums[: len(rows)]
        merged = [_reduced(row, torch.sum if is_sum else reduction) for row in rows if row]
        return _reduced([(1.0, value) for value in merged], reduction)


def _reduced(pairs: Sequence[tuple[float, Any]], reduction: Callable[[Tensor], Tensor] | None) -> Tensor:
    """The weighted mean (None), or another reduction, of (weight, value). With weight 0 not even a NaN counts."""
    values = torch.stack([torch.as_tensor(value, dtype=torch.get_default_dtype()).detach() for _, value in pairs])
    if reduction is not None:
        return reduction(values)
    weights = torch.tensor([weight for weight, _ in pairs])
    total = weights.sum()
    return (values.nan_to_num() if not total else values[weights > 0] * weights[weights > 0] / total).sum()


class RoundingWatch(TorchDispatchMode):
    """While it is active: whether user code rounds a tensor of `dtype` to a lower precision, as norms of Llama do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.has_rounded = False
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(result, Tensor) and result.is_floating_point():
            self.has_rounded |= args[0].dtype == self._dtype and result.itemsize < args[0].itemsize
        return result


@rank_of_run
def run_reference(case: Case, num_microbatches: int) -> RankResult:
    """Train in this process.

    Args:
        case: what is trained.
        num_microbatches: B, at most so many for each batch; 1: whole batches.
    """
    module = prepare(case, whole=True)
    steps = _PiecewiseSteps(case, num_microbatches)
    accumulate, num_data = case.trainer.accumulate_grad_batches, case.topology.data
    observer = Observer(lambda _: dict(enumerate(steps.losses)), accumulate, num_data, logs=True)
    make_trainer(case, steps, observer, devices=1).fit(module, make_loader(case, 0))
    return RankResult(
        {key: value for key, value in observer.values.items() if key.kind != "log" or steps.log.has_merged(key.name)},
        stack=steps.stack,
        draws_numbers=steps.random.has_drawn,
        has_rounded=steps.rounding.has_rounded,
    )


def weigh(rows: Sequence[SplitBatch], rule: LossWeight) -> list[PieceWeights]:
    """The weights of each data rank's pieces; those in the gradient sum to 1 over all of them.

    By samples (and for sums) every data rank counts the same, otherwise by what it has.
    """
    weighting = LossWeighting(rule, 1, None)
    own = [weighting.for_training(row.pieces, row.sizes) for row in rows]
    if rule in ("samples", "sum"):
        return [PieceWeights(w.in_mean, w.in_loss, tuple(g / len(rows) for g in w.in_gradient)) for w in own]
    together = iter(weighting.for_training([piece for row in rows for piece in row.pieces], rows[0].sizes).in_gradient)
    return [PieceWeights(w.in_mean, w.in_loss, tuple(next(together) for _ in w.in_gradient)) for w in own]


class _PiecewiseSteps(Callback):
    """Replaces the module's step by one that runs it on each piece of the batches, one after another."""

    stack: str
    log: PiecewiseLog

    def __init__(self, case: Case, num_microbatches: int) -> None:
        self.losses: list[Tensor] = []
        """of the last batch, by data rank"""
        self.rounding = RoundingWatch(case.dtype)
        self.random = KeyedRandom(case.seed, is_keyed=case.topology.world_size > 1 or num_microbatches > 1)
        self._case = case
        self._splitter = WholeSplitter(case.options.batch_rule)
        self._num_microbatches = num_microbatches
        rule = case.options.loss_weight
        self._rule: LossWeight = "samples" if rule == "auto" else rule
        self._has_run = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The module is built now."""
        stack = find_stack(pl_module, self._case.options.blocks)
        self.stack = stack.name
        self._rule = for_model(self._rule, pl_module, self._case.options.batch_dim)
        num_data = self._case.topology.data
        self.log = PiecewiseLog(pl_module, num_data)
        self.random.attach(stack.blocks)
        step = pl_module.training_step

        @wraps(step)
        def training_step(batch: Any, *arguments: Any, **keywords: Any) -> Any:
            rows = [batch]
            for data_rank in range(1, num_data):  # the batches of others, on their way through the module's hooks
                other = self._case.batches_of(data_rank)[batch_idx(trainer)]
                other = trainer.lightning_module.on_before_batch_transfer(other, 0)
                rows.append(trainer.strategy.batch_to_device(other, dataloader_idx=0))
            return self._run(trainer, rows, lambda piece: step(piece, *arguments, **keywords))

        object.__setattr__(pl_module, "training_step", training_step)
        self._collections = Collections(pl_module, modules_outside(pl_module, stack))

    def _run(self, trainer: pl.Trainer, batches: Sequence[Any], step: UserStep) -> Any:
        source = source_of(trainer)
        rows = [self._splitter.split(batch, self._num_microbatches, source) for batch in batches]
        weights = weigh(rows, self._rule)
        results, module = [], trainer.lightning_module
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()} if len(rows) > 1 else {}
        with self.random.batch(batch_key(trainer)):
            for data_rank, (row, own) in enumerate(zip(rows, weights, strict=True)):
                with _buffers(module, buffers) if data_rank else nullcontext():
                    results.append(self._run_row(row, own, data_rank, step))
        losses = [[_loss_of(result) for result in row] for row in results]
        self.log.finish(losses if self._rule == "sum" else ())
        self.losses = [_weighted(row, own.in_loss).detach() for row, own in zip(losses, weights, strict=True)]
        all_losses = [loss for row in losses for loss in row]
        total = _weighted(all_losses, [weight for own in weights for weight in own.in_gradient])
        own, detached = weights[0], [detach_tree(result) for result in results[0]]
        first = rows[0].merge(detached, own.in_mean, in_loss=own.in_loss, has_loss=True)
        return {**first, "loss": total} if isinstance(first, Mapping) else total

    def _run_row(self, row: SplitBatch, weights: PieceWeights, data_rank: int, step: UserStep) -> list[Any]:
        """Run the step on a data rank's pieces."""
        results = []
        self._collections.begin_batch()
        for m, (piece, weight) in enumerate(zip(row.pieces, weights.in_mean, strict=True)):
            self.random.begin(data_rank, m)
            self.log.begin(data_rank, weight, _num_samples(row, m))
            self._collections.enter(m)
            with nullcontext() if self._has_run else self.rounding:
                results.append(step(piece))
            self._has_run = True
            self.random.end()
        left = self._collections.end_batch(len(results))
        for m, (own, result) in enumerate(zip(left, results, strict=True)):
            own.note_means(result, self.log.means_of(data_rank, m))
        if data_rank:  # the module holds data rank 0's
            self._collections.store({path: [] for own in left for path in own.appended}, {})
        else:
            keep_collected(self._collections, row, weights, left)
        return results


def _num_samples(row: SplitBatch, piece: int) -> int:
    """The batch size with which Lightning weighs what is logged: in whole batches what it finds itself."""
    if len(row.pieces) > 1:
        return row.sizes.parts[0][piece]
    try:
        return extract_batch_size(row.pieces[0])
    except MisconfigurationException:  # there is no tensor
        return 1


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise UnsupportedError(
            f"training_step returned {type(loss).__name__}: a check needs a loss of every batch, a tensor or a "
            f"dictionary with the key 'loss'"
        )
    return loss


def _weighted(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """With weight 0 not even a NaN counts: the mean over no tokens is one."""
    counted = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    return torch.stack([one.reshape(()) for one in counted]).sum() if counted else losses[0] * 0.0


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
