"""3-D parallel cross entropy, of logits that are sharded over the vocabulary, averaged over all ranks' tokens.

logits [rows, V/n]  -->  the maximum of each row, then (sum of exps, target's logit): two all-reduces of a few numbers
losses [rows]       -->  (sum, count) over the ranks with other rows: a mean of means would weigh ignored tokens

No rank ever holds a whole row of logits. The backward sends nothing.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.tensor3d.collectives import all_reduce
from lightning_hanayo.tensor3d.mesh import Mesh, MeshAxis
from lightning_hanayo.tensor3d.sharding import DimShard

Reduction = Literal["mean", "sum", "none"]


def cross_entropy3d(
    logits: Tensor,
    labels: Tensor,
    vocabulary: DimShard,
    mesh: Mesh,
    *,
    batch_axes: str = "x",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns `torch.nn.functional.cross_entropy` of all ranks' rows, in fp32 at least, and the same on all of them.

    If no token counts at all, the mean is 0, and so are the gradients.

    Example:
        >>> loss = cross_entropy3d(head(x), labels, head.vocabulary, mesh)

    Args:
        logits: [..., V/n], or longer: what follows this rank's part of the vocabulary isn't read.
        labels: [...], ids of the whole vocabulary, the same along the axes that it is sharded over.
        vocabulary: how the logits are sharded: a `Head3D`'s `vocabulary`.
        mesh: all its ranks along the vocabulary's axes and along `batch_axes` call this.
        batch_axes: the axes along which ranks hold other rows; "" for the loss of this rank's rows alone.
        ignore_index: the label of tokens that don't count.
        label_smoothing: the share of the uniform distribution in the target.
        reduction: "mean" or "sum" over all ranks' rows; "none": [...] of this rank's rows.

    Raises:
        HanayoError: the shapes don't fit each other.
    """
    start, stop = vocabulary.span(mesh)
    if logits.shape[:-1] != labels.shape or logits.shape[-1] < stop - start:
        raise HanayoError(
            f"cross_entropy3d: logits {tuple(logits.shape)} don't fit labels {tuple(labels.shape)} and the "
            f"{stop - start} entries of this rank's part of the vocabulary; expected [..., V/n] and [...]"
        )
    shard = _VocabularyShard(mesh.axis(vocabulary.axes), start, vocabulary.size, ignore_index, label_smoothing)
    losses: Tensor = _CrossEntropy.apply(logits[..., : stop - start], labels, shard)
    if reduction == "none":
        return losses
    counted = labels != ignore_index
    sums = torch.stack((losses.sum(), counted.sum().to(losses.dtype)))
    value, count = (all_reduce(sums, mesh.axis(batch_axes)) if batch_axes else sums).unbind()
    return value if reduction == "sum" else value / count.clamp_min(1)


@dataclass(frozen=True)
class _VocabularyShard:
    """A rank's part of the vocabulary, which begins at `start`, and the options of the loss."""

    axis: MeshAxis
    start: int
    size: int
    ignore_index: int
    smoothing: float

    def targets(self, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns the columns of the labels, [..., 1], and whether each is this rank's and counts."""
        columns = (labels - self.start).unsqueeze(-1)
        is_own = (columns >= 0) & (columns < count) & (labels != self.ignore_index).unsqueeze(-1)
        return columns.clamp(0, max(0, count - 1)), is_own


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: _VocabularyShard) -> Tensor:
        wide, count = logits.to(torch.promote_types(logits.dtype, torch.float32)), logits.shape[-1]
        largest = wide.amax(-1) if count else wide.new_full(labels.shape, -torch.inf)
        largest = shard.axis.all_reduce_max(largest).wait()
        wide = wide - largest.unsqueeze(-1)
        columns, is_own = shard.targets(labels, count)
        target = wide.gather(-1, columns).where(is_own, 0).squeeze(-1) if count else torch.zeros_like(largest)
        parts = torch.stack((wide.exp().sum(-1), target, wide.sum(-1)))
        exps, target, sums = shard.axis.all_reduce(parts).wait()
        ctx.shard = shard
        ctx.save_for_backward(logits, labels, largest + exps.log())
        smooth = shard.smoothing
        losses: Tensor = exps.log() - (1 - smooth) * target - (smooth / shard.size * sums if smooth else 0)
        return losses.masked_fill(labels == shard.ignore_index, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shard: _VocabularyShard = ctx.shard
        logits, labels, log_sum = ctx.saved_tensors
        dlogits = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp_()
        if shard.smoothing:
            dlogits -= shard.smoothing / shard.size
        columns, is_own = shard.targets(labels, logits.shape[-1])
        if logits.shape[-1]:
            dlogits.scatter_add_(-1, columns, is_own.to(dlogits.dtype) * (shard.smoothing - 1))
        dlogits *= gradient.masked_fill(labels == shard.ignore_index, 0).unsqueeze(-1)
        return dlogits.to(logits.dtype), None, None
