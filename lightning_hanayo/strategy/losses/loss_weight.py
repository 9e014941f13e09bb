"""How much each micro-batch counts in the mean loss of its batch."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.pipeline_parallel.batches.microbatches import PieceSizes

LossWeight = Literal["samples", "tokens", "shifted_tokens", "sum"] | Callable[[Any], float]
IGNORED_LABEL = -100
_CAUSAL = re.compile("ForCausalLM|LMHeadModel")
"""the names of causal models of transformers"""


def for_model(rule: LossWeight, model: nn.Module, batch_dim: int = 0) -> LossWeight:
    """The rule as it is meant for a model: "tokens" are those that count in a causal model of transformers.

    Such a model shifts its labels, so the first one of each sequence predicts nothing.
    """
    if rule == "tokens" and batch_dim == 0 and any(map(_shifts_labels, model.modules())):
        return "shifted_tokens"
    return rule


def _shifts_labels(part: nn.Module) -> bool:
    """Whether it calls the loss of causal models, by its name: a few such models (Bart's, XLNet) don't, nor shift."""
    kinds = type(part).__mro__
    if not any(kind.__module__ == "transformers.modeling_utils" for kind in kinds):
        return False
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    calls_loss = code is not None and "loss_function" in code.co_names
    return calls_loss and any(_CAUSAL.search(kind.__name__) for kind in kinds)


@dataclass(frozen=True)
class PieceWeights:
    """The weights of the pieces of one data rank's batch, in their order."""

    in_mean: tuple[float, ...]
    """in means over the batch, such as logged ones; they sum to 1"""
    in_loss: tuple[float, ...]
    """in the loss: the same, except for losses that are sums, where each piece has weight 1"""
    in_gradient: tuple[float, ...]
    """in the gradient, which is summed over data ranks"""
    is_sum: bool = False
    """whether the loss is a sum, in training"""
    logged: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """with which logged values are added up, by name, where that isn't their mean"""


class LossWeighting:
    """Weighs the pieces of a batch by `HanayoStrategy(loss_weight=...)`.

    Args:
        rule: what counts: samples, labels, or what the user's function returns.
        num_data: D, data ranks.
        group: the data ranks, for CPU tensors; None if there is one.
    """

    def __init__(self, rule: LossWeight, num_data: int, group: dist.ProcessGroup | None) -> None:
        self._rule = rule
        self._num_data = num_data
        self._group = group

    def for_training(self, pieces: Sequence[Any], sizes: PieceSizes) -> PieceWeights:
        """Weights that sum to 1 over all data ranks. Called by all data ranks.

        By samples (and for sums) every data rank counts the same, as in DDP; otherwise by what it has, summed over
        the data ranks.

        Raises:
            HanayoError: labels are to be counted, and none are found; or samples, and they can't be counted.
        """
        if self._rule == "sum":
            in_mean = _proportions(_counts(pieces, sizes, "samples"))
            present = tuple(float(piece is not None) for piece in pieces)
            return PieceWeights(in_mean, present, tuple(one / self._num_data for one in present), is_sum=True)
        counts = _counts(pieces, sizes, self._rule)
        in_mean, local = _proportions(counts), sum(counts)
        total = local
        if self._rule == "samples":
            total *= self._num_data
        elif self._group is not None:
            summed = torch.tensor([local], dtype=torch.float64)
            dist.all_reduce(summed, group=self._group)
            total = float(summed)
        return PieceWeights(in_mean, in_mean, tuple(n / total if total else 0.0 for n in counts))

    def for_evaluation(self, pieces: Sequence[Any], sizes: PieceSizes) -> PieceWeights:
        """As in training, without other data ranks: there is no gradient. By samples where the rule can't be applied.

        Evaluation batches may lack the labels that training batches have.
        """
        counts = None
        with suppress(Exception):  # the user's function was written for training batches
            counts = None if self._rule == "sum" else _counts(pieces, sizes, self._rule)
        in_mean = _proportions(_counts(pieces, sizes, "samples") if counts is None else counts)
        return PieceWeights(in_mean, in_mean, in_mean)


def _proportions(counts: Sequence[float]) -> tuple[float, ...]:
    total = sum(counts)
    return tuple(n / total if total else 0.0 for n in counts)


def _counts(pieces: Sequence[Any], sizes: PieceSizes, rule: Any) -> list[float]:
    """How much each piece counts; 0 where a rank has none."""
    present = sum(piece is not None for piece in pieces)
    if rule == "samples":
        if present > 1 and not sizes.are_known:
            raise HanayoError(
                "samples can't be counted in what split_batch returned: its tensors have different numbers of rows. "
                "Set loss_weight=lambda micro_batch: ..., which returns the number of samples, say."
            )
        return [0.0 if piece is None else float(n) for n, piece in zip(sizes.parts[0], pieces, strict=True)]
    if callable(rule):
        return [0.0 if piece is None else float(rule(piece)) for piece in pieces]
    labels = [_labels(piece, rule) for piece in pieces if piece is not None]
    counted = [((one[..., 1:] if rule == "shifted_tokens" else one) != IGNORED_LABEL).sum() for one in labels]
    # A device is asked once for all pieces.
    counts = iter(torch.stack(counted).tolist() if counted else ())
    return [0.0 if piece is None else float(next(counts)) for piece in pieces]


def _labels(piece: Any, rule: str) -> Tensor:
    """`batch["labels"]`, `batch.labels`, or the last tensor of a tuple: it must hold integers."""
    if isinstance(piece, Mapping):
        labels = piece.get("labels")
    elif isinstance(piece, (tuple, list)) and piece:
        labels = piece[-1]
    else:
        labels = getattr(piece, "labels", None)
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise HanayoError(
            f"loss_weight={rule!r} counts the labels that aren't -100, but the batch has none: expected "
            "batch['labels'], batch.labels or the last item of a tuple, as integers. Pass a function instead."
        )
    return labels
