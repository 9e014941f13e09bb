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
    """Of each micro-batch: its share in this rank's batch, and the weight of its loss's gradient.

    The shares sum to 1, but for losses that are sums, which all count whole.
    """

    of_batch: tuple[float, ...]
    of_gradient: tuple[float, ...]


def shares(
    microbatches: Sequence[Any], loss_weight: LossWeight, *, num_data: int, group: dist.ProcessGroup | None
) -> Shares:
    """The shares of one data rank's micro-batches. Gradients are summed over data ranks with weights that sum to 1.

    By samples (and sums), every data rank counts alike, as in DDP; otherwise by what it counts, summed over `group`.
    """
    if loss_weight == "sum":
        return Shares((1.0,) * len(microbatches), (1 / num_data,) * len(microbatches))
    counts = [count(microbatch, loss_weight) for microbatch in microbatches]
    local = sum(counts)
    total = local * num_data if loss_weight == "samples" else _sum(local, group)
    of_batch = tuple(n / local if local else 0.0 for n in counts)
    return Shares(of_batch, tuple(n / total if total else 0.0 for n in counts))


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
