"""The loss over the grid: cross entropy of logits that are cut over the vocabulary, and a mean over all ranks' tokens.

logits [rows, V/n]  -->  the largest of each row, then (sum of exps, target's logit): two all-reduces of a few numbers
losses [rows]       -->  (sum, count) over the ranks with other rows: a mean of means would weigh ignored tokens

No rank ever has a whole row of logits. In the backward nothing is sent.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.tensor3d.collectives import total
from lightning_hanayo.tensor3d.mesh import Mesh, MeshAxis
from lightning_hanayo.tensor3d.sharding import Cut

Reduction = Literal["mean", "sum", "none"]


def cross_entropy3d(
    logits: Tensor,
    labels: Tensor,
    vocabulary: Cut,
    grid: Mesh,
    *,
    rows: str = "x",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """As `torch.nn.functional.cross_entropy` of all ranks' rows, in fp32 at least, and the same on all of them.

    Where no token counts at all the mean is 0, and so are the gradients.

    Args:
        logits: [..., V/n], or longer: what lies beyond the vocabulary's part isn't read.
        labels: [...], ids of the whole vocabulary, the same along the axes it is cut over.
        vocabulary: how it is cut: a `Head3D`'s.
        grid: all ranks along the vocabulary's axes and `rows` call this.
        rows: the axes along which ranks hold other rows; "" for a sum over this rank's alone.
        ignore_index: the label of tokens that don't count.
        label_smoothing: the share of the uniform distribution in the target.
        reduction: "mean" and "sum" over all ranks' rows; "none": [...] of this rank's.

    Raises:
        HanayoError: shapes don't fit.
    """
    start, stop = vocabulary.span(grid)
    if logits.shape[:-1] != labels.shape or logits.shape[-1] < stop - start:
        raise HanayoError(
            f"cross_entropy3d: logits {tuple(logits.shape)} don't fit labels {tuple(labels.shape)} and the "
            f"{stop - start} entries of this rank's part of the vocabulary; expected [..., V/n] and [...]"
        )
    share = _Share(grid.axis(vocabulary.axes), start, vocabulary.size, ignore_index, label_smoothing)
    losses: Tensor = _CrossEntropy.apply(logits[..., : stop - start], labels, share)
    if reduction == "none":
        return losses
    counted = labels != ignore_index
    sums = torch.stack((losses.sum(), counted.sum().to(losses.dtype)))
    value, count = (total(sums, grid.axis(rows)) if rows else sums).unbind()
    return value if reduction == "sum" else value / count.clamp_min(1)


@dataclass(frozen=True)
class _Share:
    """A rank's part of the vocabulary: from `start` on."""

    axis: MeshAxis
    start: int
    size: int
    ignore_index: int
    smoothing: float

    def targets(self, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Columns [..., 1] and whether they are this rank's and count."""
        columns = (labels - self.start).unsqueeze(-1)
        is_own = (columns >= 0) & (columns < count) & (labels != self.ignore_index).unsqueeze(-1)
        return columns.clamp(0, max(0, count - 1)), is_own


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, share: _Share) -> Tensor:
        wide, count = logits.to(torch.promote_types(logits.dtype, torch.float32)), logits.shape[-1]
        largest = wide.amax(-1) if count else wide.new_full(labels.shape, -torch.inf)
        largest = share.axis.all_reduce_max(largest).wait()
        wide = wide - largest.unsqueeze(-1)
        columns, is_own = share.targets(labels, count)
        target = wide.gather(-1, columns).where(is_own, 0).squeeze(-1) if count else torch.zeros_like(largest)
        parts = torch.stack((wide.exp().sum(-1), target, wide.sum(-1)))
        exps, target, sums = share.axis.all_reduce(parts).wait()
        ctx.share = share
        ctx.save_for_backward(logits, labels, largest + exps.log())
        smooth = share.smoothing
        losses: Tensor = exps.log() - (1 - smooth) * target - (smooth / share.size * sums if smooth else 0)
        return losses.masked_fill(labels == share.ignore_index, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        share: _Share = ctx.share
        logits, labels, log_sum = ctx.saved_tensors
        dlogits = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp_()
        if share.smoothing:
            dlogits -= share.smoothing / share.size
        columns, is_own = share.targets(labels, logits.shape[-1])
        if logits.shape[-1]:
            dlogits.scatter_add_(-1, columns, is_own.to(dlogits.dtype) * (share.smoothing - 1))
        dlogits *= gradient.masked_fill(labels == share.ignore_index, 0).unsqueeze(-1)
        return dlogits.to(logits.dtype), None, None
