"""The 3-D parallel embedding, in place of `nn.Embedding`, and the language-model head, which may share its table.

ids [batch/x, seq]  --lookup-->                  [batch/x, seq, H/z], zero where another rank of y holds the row
                    --reduce-scatter along y-->  [batch/x, seq/y, H/z]

x [batch/x, seq/y, H/z]  --head-->               logits [batch/x, seq, V/(y z)]

The table [V, H] is stored as [V/(y x), H/z] and gathered along x.

3-D parallel cross entropy, of logits that are sharded over the vocabulary, averaged over all ranks' tokens.

logits [rows, V/n]  -->  the maximum of each row, then (sum of exps, target's logit): two all-reduces of a few numbers
losses [rows]       -->  (sum, count) over the ranks with other rows: a mean of means would weigh ignored tokens

No rank ever holds a whole row of logits. The backward sends nothing.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_hanayo.chunked_loss.token_shares import OwnRows
from lightning_hanayo.divisibility import Divisibility, check_divisibility
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor_parallel.collectives import all_gather, all_reduce, padded, reduce_scatter
from lightning_hanayo.tensor_parallel.layers.linear import Linear3D, LinearSharding, guarded_weight
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import SEQUENCE, ParallelStyle
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard, shard_module
from lightning_hanayo.tensor_parallel.stage_context import StageContext


class Embedding3D(nn.Embedding):
    """A lookup in a table of which each rank stores 1/(x y z).

    Example:
        >>> embedding = Embedding3D(50257, 768, context=context)
        >>> embedding(ids).shape  # [batch/x, seq/y, 768/z]

    Args:
        *args: those of `nn.Embedding`: sizes of the whole table.
        context: of the stage.
        style: of the linear layer that reads its output.
        **kwargs: those of `nn.Embedding`.

    Raises:
        UnsupportedError: an option needs the whole table or the whole batch.
        HanayoError: the features don't divide.
    """

    context: StageContext
    style: ParallelStyle
    weight = property(guarded_weight)

    def __init__(self, *args: Any, context: StageContext, style: ParallelStyle = SEQUENCE, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallelize_embedding(self, context, style)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch/x, seq] to [batch/x, seq/y, H/z]. Called by all ranks; ids are the same along y and z."""
        mesh, along_y = self.context.mesh, self.style.all_gather
        weight, axis = self._parameters["weight"], mesh.axis(along_y.axis)
        assert weight is not None
        num_rows = -(-self.num_embeddings // axis.size)  # of the table gathered along x, with their padding
        stored = padded(weight, 0, -(-num_rows // mesh.size("x")))
        table = all_gather(stored, mesh.axis("x"), 0, num_rows)
        rows = OwnRows(axis, table, num_rows * axis.rank, num_rows, self.num_embeddings)
        found = rows.look_up(ids, self.padding_idx)
        return reduce_scatter(found, axis, along_y.dim)


def parallelize_embedding(module: nn.Embedding, context: StageContext, style: ParallelStyle = SEQUENCE) -> None:
    """Parallelize an `nn.Embedding` in place. The parameter object, names and attributes stay.

    Raises:
        UnsupportedError: it has an option that needs the whole table or the whole batch.
        HanayoError: its features don't divide.
    """
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option):
            raise UnsupportedError(f"an embedding over the cube can't have {option}={getattr(module, option)!r}")
    required = Divisibility(type(module).__name__, "features", module.embedding_dim, style.in_axes)
    check_divisibility([required], context.mesh.sizes)
    dims = DimShard(module.num_embeddings, style.out_axes), DimShard(module.embedding_dim, style.in_axes)
    shard_module(module, Embedding3D, {"weight": Shard(dims)}, context.mesh, context=context, style=style)


class Head3D(Linear3D):
    """A `Linear3D` to a vocabulary of any size. Its weight may be an `Embedding3D`'s parameter.

    Its logits stay sharded for `cross_entropy3d`. If the vocabulary doesn't divide, the last parts hold fewer logits,
    followed by zeros.

    Example:
        >>> head = Head3D(768, 50257, bias=False, context=context)
        >>> loss = cross_entropy3d(head(x), labels, head.vocabulary, context.mesh)
    """

    def shard(self, context: StageContext, style: ParallelStyle, **_: Any) -> None:
        """Shard the layer, whose weight may be sharded already, as an embedding's."""
        LinearSharding(context, style, (self.out_features, self.in_features)).attach(self)

    @property
    def vocabulary(self) -> DimShard:
        """How the logits are sharded."""
        return self.sharding.vector.dims[0]

    def forward(self, x: Tensor) -> Tensor:
        """Called by all ranks of the mesh, in the same order."""
        logits, bias = self.sharding.forward(x, None), self._parameters["bias"]
        if bias is None:
            return logits
        return logits + pad(bias, (0, logits.shape[-1] - bias.shape[0])).to(logits.dtype)


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
        logits: [..., V/n], or longer: entries behind this rank's part of the vocabulary aren't read.
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
    axis, size = mesh.axis(vocabulary.axes), stop - start
    wide = logits[..., :size].to(torch.promote_types(logits.dtype, torch.float32))
    largest = wide.detach().amax(-1) if size else wide.new_full(labels.shape, -torch.inf)
    wide = wide - axis.all_reduce(largest, dist.ReduceOp.MAX).wait().unsqueeze(-1)
    is_own = (labels >= start) & (labels < stop) & (labels != ignore_index)
    columns = (labels - start).where(is_own, 0).unsqueeze(-1)
    target = wide.gather(-1, columns).squeeze(-1).where(is_own, 0) if size else wide.sum(-1)
    exps, target, sums = all_reduce(torch.stack((wide.exp().sum(-1), target, wide.sum(-1))), axis).unbind()
    losses = exps.log() - (1 - label_smoothing) * target
    if label_smoothing:
        losses = losses - label_smoothing / vocabulary.size * sums
    losses = losses.masked_fill(labels == ignore_index, 0)
    if reduction == "none":
        return losses
    counted = labels != ignore_index
    sums = torch.stack((losses.sum(), counted.sum().to(losses.dtype)))
    value, count = (all_reduce(sums, mesh.axis(batch_axes)) if batch_axes else sums).unbind()
    return value if reduction == "sum" else value / count.clamp_min(1)
