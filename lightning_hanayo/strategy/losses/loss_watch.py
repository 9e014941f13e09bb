"""Compares the weights of micro-batches with what their losses really were means of, and warns where they differ.

    cross_entropy counted     12      9       4       3      labels
    loss_weight="samples"     1/4     1/4     1/4     1/4    a warning: Set HanayoStrategy(loss_weight='tokens')
    loss_weight="tokens"      12/28   9/28    4/28    3/28   right

A loss that is no mean over samples, such as one with in-batch negatives, is known from its graph, too. On a GPU the
counts are there, and to read them the host waits for the batch: so only the first batches are compared, and some later.
"""

import warnings
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isclose
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.pipeline_parallel.autograd.loss_graph import LossGraph, LossTerm, in_host_memory, read_loss
from lightning_hanayo.pipeline_parallel.batches.microbatches import PieceSizes
from lightning_hanayo.strategy.losses.loss_weight import LossWeight, LossWeighting, for_model
from lightning_hanayo.strategy.losses.sample_mixing import noting_mixed_samples

_NAMED: tuple[LossWeight, ...] = ("samples", "tokens", "shifted_tokens", "sum")
_TOLERANCE = 1e-5
"""class weights are added in fp32"""
_ALWAYS, _EVERY = 16, 64
"""the first batches are all compared, then every so many"""
_COUNT_ALL_LABELS = "lambda micro_batch: int((micro_batch['labels'] != -100).sum())"


class LossWatch:
    """Watches the losses of one run on one rank, until it has given a warning.

    Args:
        model: the user's module.
        rule: `HanayoStrategy(loss_weight=...)`.
        batch_dim: the dimension of the samples.
        warns: whether this rank is the one that warns; the ranks of a cube see the same.
        shares_samples: whether each rank of a cube runs the step on its share of a micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: LossWeight,
        *,
        batch_dim: int,
        warns: bool,
        shares_samples: bool,
        is_on: bool = True,
    ) -> None:
        self._model = model
        self._rule = rule
        self._batch_dim = batch_dim
        self._warns = warns
        self._shares_samples = shares_samples
        self.is_on = True
        """until it has given a warning, and unless something else knows how losses add up"""
        self._is_first = True
        self._num_batches = 0
        self._noted: dict[int, LossGraph] = {}
        self._mixing: dict[str, None] = {}

    def training(self, sizes: Sequence[int]) -> AbstractContextManager[None]:
        """To be open while a batch trains. `sizes`: the samples of this rank's micro-batches."""
        self._num_batches += 1
        if self._is_first and (len(sizes) > 1 or self._shares_samples):
            return noting_mixed_samples(sizes, self._batch_dim, self._mixing)
        return nullcontext()

    def note(self, sizes: Sequence[int], microbatch: int, loss: Tensor, stop: Collection[Node]) -> None:
        """Read a micro-batch's loss before its backward. `sizes`: the samples of this rank's micro-batches."""
        if self.is_on and self._is_due and loss.numel() == 1:
            self._noted[microbatch] = read_loss(loss, stop, sizes[microbatch], couplings=self._is_first)

    def noted(self, microbatch: int) -> LossGraph | None:
        """What `note` has read, once."""
        return self._noted.pop(microbatch, None)

    def compare(
        self, pieces: Sequence[Any], sizes: PieceSizes, losses: Sequence[LossGraph | None], weights: Sequence[float]
    ) -> None:
        """Warn if `weights` aren't those with which the pieces' losses add up to the loss of the batch.

        Args:
            pieces: of the batch; None where a rank has none.
            sizes: theirs.
            losses: theirs; None where nothing was read.
            weights: theirs, in the loss.
        """
        counted = [i for i, piece in enumerate(pieces) if piece is not None and losses[i] is not None and weights[i]]
        if not self.is_on or len(counted) < 2:
            return
        graphs = in_host_memory([graph for i in counted if (graph := losses[i]) is not None])
        self._is_first = False
        couplings = dict.fromkeys(coupling for graph in graphs for coupling in graph.couplings) | self._mixing
        couplings |= dict.fromkeys(_products(graphs))
        message = self._coupled(couplings, len(counted)) or self._weighed_otherwise(
            [pieces[i] for i in counted], sizes.of(counted), graphs, [weights[i] for i in counted]
        )
        if message:
            self.is_on = False
            if self._warns:
                warnings.warn(message, stacklevel=2)

    @property
    def _is_due(self) -> bool:
        """Whether this batch is compared. The same on all ranks of a cube."""
        return self._num_batches <= _ALWAYS or self._num_batches % _EVERY == 0

    def _coupled(self, couplings: Collection[str], num_pieces: int) -> str:
        if not couplings:
            return ""
        pieces, of_cube = "micro-batches", ""
        if self._shares_samples:
            pieces = "shares of micro-batches"
            of_cube = " With cube_outside='replicate' each rank of the cube has all samples of a micro-batch."
        return (
            f"the loss of {type(self._model).__name__}.training_step has {' and '.join(couplings)}, so it isn't a mean "
            f"over samples. It is computed within each of the {num_pieces} {pieces} of a batch, and no loss_weight "
            f"makes of them the loss of the whole batch: the training depends on num_microbatches, as with "
            f"accumulate_grad_batches.{of_cube}"
        )

    def _weighed_otherwise(
        self, pieces: Sequence[Any], sizes: PieceSizes, graphs: Sequence[LossGraph], weights: Sequence[float]
    ) -> str:
        terms = [graph.terms for graph in graphs]
        if not any(terms):
            return self._weighed_by_samples(pieces, sizes, weights)
        if len({tuple((term.function, term.kind) for term in row) for row in terms}) > 1:
            return ""
        columns = list(zip(*terms, strict=True))
        wrong = next((column for column in columns if not fits(column, weights, sizes)), None)
        if wrong is None or _are_of_single_samples(terms, wrong, sizes) and self._rule == "samples":
            return ""
        rule = getattr(self._rule, "__name__", self._rule)
        return (
            f"the losses of the {len(pieces)} micro-batches don't add up to the loss of the whole batch: "
            f"{self._described(wrong)}, and loss_weight={rule!r} weighs them {_listed(weights)}. "
            f"{self._way_out(columns, pieces, sizes)}"
        )

    def _weighed_by_samples(self, pieces: Sequence[Any], sizes: PieceSizes, weights: Sequence[float]) -> str:
        """Of a fused or compiled loss nothing is seen but its labels."""
        tokens = _weights_by(for_model("tokens", self._model, self._batch_dim), pieces, sizes)
        if self._rule != "samples" or tokens is None or _are_close(weights, tokens):
            return ""
        return (
            f"some labels are -100, and not equally many in each of the {len(pieces)} micro-batches, which "
            f"loss_weight='samples' weighs {_listed(weights)}. The graph of the loss doesn't show what it is a mean "
            f"over: if over labels, set HanayoStrategy(loss_weight='tokens')."
        )

    def _described(self, column: Sequence[LossTerm]) -> str:
        first = column[0]
        if first.kind == "constant":
            return f"{first.function} on parameters counts {len(column)} times"
        if first.kind == "sum" and not _is_divided(column):
            named = [name for name, part in self._model.named_modules() if getattr(part, "reduction", None) == "sum"]
            return f"{first.function}{f' ({named[0]})' if named else ''} is a sum over samples"
        return f"{first.function} is a mean over {_listed([float(term.count) for term in column])} (labels or elements)"

    def _way_out(self, columns: Sequence[Sequence[LossTerm]], pieces: Sequence[Any], sizes: PieceSizes) -> str:
        for name in _NAMED:
            rule = for_model(name, self._model, self._batch_dim)
            if _fit(columns, _weights_by(rule, pieces, sizes), sizes):
                return f"Set HanayoStrategy(loss_weight={name!r})."
        if _fit(columns, _weights_by("tokens", pieces, sizes), sizes):
            return f"Set HanayoStrategy(loss_weight={_COUNT_ALL_LABELS})."
        if len(columns) > 1:
            return "No loss_weight by name is right for all terms of the loss: let all be means over the same."
        return (
            "Pass as loss_weight a function of the micro-batch that returns what the loss is a mean over: the number "
            "of targets that aren't ignored, or the sum of their class weights, such as "
            "lambda micro_batch: float(class_weights[micro_batch['y']].sum())."
        )


def fits(column: Sequence[LossTerm], weights: Sequence[float], sizes: PieceSizes) -> bool:
    """Whether the weights are right for a term of the loss, given as it is in each piece; also if it can't be told."""
    kind, counts = column[0].kind, [float(term.count) for term in column]
    if kind == "constant":
        return isclose(sum(weights), 1.0, rel_tol=_TOLERANCE)
    if kind == "sum" and not (_is_divided(column) and _is_count(column, sizes)):
        return not _sums_samples(column, sizes) or all(weight == 1.0 for weight in weights)
    if not column[0].is_loss_function and len(set(counts)) == 1 and sum(weights) <= 1.0 + _TOLERANCE:
        return True  # a mean over something else than samples
    total = sum(counts)
    return not total or _are_close(weights, [count / total for count in counts])


def _products(graphs: Sequence[LossGraph]) -> list[str]:
    """What is multiplied with each other in the losses and was computed from samples, as it differs over the pieces."""
    found = []
    if any(map(_differ, zip(*(graph.factors for graph in graphs), strict=False))):
        found.append("a product of means or sums over samples")
    for pairs in zip(*(graph.pairs for graph in graphs), strict=False):
        if all(map(_differ, zip(*pairs, strict=True))):
            found.append("a product of samples with samples, as for in-batch negatives")
    return found


def _differ(summaries: Sequence[float]) -> bool:
    return not all(isclose(one, summaries[0], rel_tol=1e-6) for one in summaries)


def _are_of_single_samples(rows: Sequence[Sequence[LossTerm]], column: Sequence[LossTerm], sizes: PieceSizes) -> bool:
    """Whether each sample has a term of its own, as where a loop adds the losses of sequences of different lengths."""
    counts = [sum(term.function == column[0].function for term in row) for row in rows]
    return counts == list(sizes.parts[0]) and max(counts) > 1


def _are_close(weights: Sequence[float], others: Sequence[float]) -> bool:
    return all(abs(one - other) < _TOLERANCE for one, other in zip(weights, others, strict=True))


def _is_divided(column: Sequence[LossTerm]) -> bool:
    return any(term.divided for term in column)


def _is_count(column: Sequence[LossTerm], sizes: PieceSizes) -> bool:
    """Whether what sums are divided by are counts, and not the same number for all."""
    divisors = [float(term.count) for term in column]
    if len(set(divisors)) > 1:
        return True
    if not sizes.are_known:
        return False
    each = [divisor / n for divisor, n in zip(divisors, sizes.parts[0], strict=True)]
    if any(term.divided == "by a product" for term in column):
        return all(isclose(one, 1.0) for one in each)
    return all(abs(one - round(one)) < 1e-9 for one in each)


def _sums_samples(column: Sequence[LossTerm], sizes: PieceSizes) -> bool:
    """Whether a sum surely is over samples: by a loss function, or of tensors with so many rows."""
    if column[0].is_loss_function:
        return True
    rows = [term.num_rows or 0 for term in column]
    per_sample = {row / n for row, n in zip(rows, sizes.parts[0], strict=True) if n}
    return sizes.are_known and len(per_sample) == 1 and per_sample.pop().is_integer()


def _weights_by(rule: LossWeight, pieces: Sequence[Any], sizes: PieceSizes) -> Sequence[float] | None:
    try:
        return LossWeighting(rule, 1, None).for_training(pieces, sizes).in_loss
    except HanayoError:  # there are no labels
        return None


def _fit(columns: Sequence[Sequence[LossTerm]], weights: Sequence[float] | None, sizes: PieceSizes) -> bool:
    return weights is not None and all(fits(column, weights, sizes) for column in columns)


def _listed(numbers: Sequence[float]) -> str:
    shown = ", ".join(f"{number:.4g}" for number in numbers[:8])
    return f"{shown} ..." if len(numbers) > 8 else shown
