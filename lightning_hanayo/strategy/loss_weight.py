"""The loss weight: each micro-batch's share in the batch's mean loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.runtime.microbatches import num_samples

LossWeight = Literal["samples", "tokens", "sum"] | Callable[[Any], float]
IGNORED = -100


@dataclass(frozen=True)
class Shares:
    """What each micro-batch of this rank's batch counts."""

    of_mean: tuple[float, ...]
    """in means over the batch, as logged ones; they sum to 1"""
    of_loss: tuple[float, ...]
    """in the loss: the same, but for losses that are sums, which all count whole"""
    of_gradient: tuple[float, ...]
    """in the gradient, which is summed over data ranks"""


def shares(
    microbatches: Sequence[Any], loss_weight: LossWeight, *, num_data: int, group: dist.ProcessGroup | None
) -> Shares:
    """The shares of one data rank's micro-batches. Gradients are summed over data ranks with weights that sum to 1.

    By samples (and sums), every data rank counts alike, as in DDP; otherwise by what it counts, summed over `group`.
    """
    if loss_weight == "sum":
        of_mean = shares(microbatches, "samples", num_data=num_data, group=None).of_mean
        there = tuple(float(microbatch is not None) for microbatch in microbatches)
        return Shares(of_mean, there, tuple(whole / num_data for whole in there))
    counted = counts(microbatches, loss_weight)
    local = sum(counted)
    total = local * num_data if loss_weight == "samples" else _sum(local, group)
    of_mean = tuple(n / local if local else 0.0 for n in counted)
    return Shares(of_mean, of_mean, tuple(n / total if total else 0.0 for n in counted))


def counts_labels(microbatches: Sequence[Any], loss_weight: LossWeight) -> bool:
    """Whether `loss_weight` finds what it counts, which an evaluation batch may not have."""
    if loss_weight == "samples":
        return True
    try:
        counts(microbatches, loss_weight)
    except Exception:  # the user's function was written for training batches
        return False
    return True


def counts(microbatches: Sequence[Any], loss_weight: Any) -> list[float]:
    """What each micro-batch counts; nothing where there is none."""
    return [0.0 if microbatch is None else count(microbatch, loss_weight) for microbatch in microbatches]


def count(microbatch: Any, loss_weight: Literal["samples", "tokens"] | Callable[[Any], float]) -> float:
    """What a micro-batch counts: its samples, its labels that aren't -100, or what the user's function says.

    Raises:
        HanayoError: `"tokens"`, and no labels are found.
    """
    if loss_weight == "samples":
        return num_samples(microbatch)
    if loss_weight == "tokens":
        return int((_labels(microbatch) != IGNORED).sum())
    return float(loss_weight(microbatch))


def _labels(microbatch: Any) -> Tensor:
    """`batch["labels"]`, `batch.labels`, or the last tensor of a tuple: it must hold integers."""
    if isinstance(microbatch, Mapping):
        labels = microbatch.get("labels")
    elif isinstance(microbatch, (tuple, list)) and microbatch:
        labels = microbatch[-1]
    else:
        labels = getattr(microbatch, "labels", None)
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise HanayoError(
            "loss_weight='tokens' counts the labels that aren't -100, but the batch has none: expected "
            "batch['labels'], batch.labels or the last item of a tuple, as integers. Pass a function instead."
        )
    return labels


def _sum(value: float, group: dist.ProcessGroup | None) -> float:
    if group is None:
        return value
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total)
