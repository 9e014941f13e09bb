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

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lightning_hanayo.divisibility import Divisibility, check_divisibility
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor_parallel.collectives import all_reduce, reduce_scatter
from lightning_hanayo.tensor_parallel.layers.linear import Linear3D, LinearSharding, guarded_weight
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis
from lightning_hanayo.tensor_parallel.product import SEQUENCE, ParallelStyle
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard, ShardedModule, shard_parameters
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from lightning_hanayo.tensor_parallel.weights import StoredWeight


class _TableShard:
    """This rank's rows of the table along y: `num_rows` of them from `first` on, with their padding."""

    def __init__(self, module: nn.Embedding, context: StageContext, style: ParallelStyle) -> None:
        self.context = context
        self.style = style
        mesh = context.mesh
        self.num_rows = -(-module.num_embeddings // mesh.size(style.all_gather.axis))
        self.first = self.num_rows * mesh.index(style.all_gather.axis)
        shape = self.num_rows, module.embedding_dim // mesh.size(style.in_axes)
        self.weight = context.weight(StoredWeight(module, shape))

    def rows_of(self, ids: Tensor, ignored: int | None = None) -> Tensor:
        """Returns the row of each id; `num_rows` for ids that another rank holds, and for the id `ignored`."""
        rows = ids - self.first
        is_elsewhere = (rows < 0) | (rows >= self.num_rows)
        if ignored is not None:
            is_elsewhere |= ids == ignored
        return rows.masked_fill(is_elsewhere, self.num_rows)


class Embedding3D(ShardedModule, nn.Embedding):
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

    table: _TableShard
    weight = property(guarded_weight)

    def __init__(self, *args: Any, context: StageContext, style: ParallelStyle = SEQUENCE, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallelize_embedding(self, context, style)

    def reset_parameters(self) -> None:
        """Called while the layer is constructed, before it is sharded."""
        weight = self._parameters["weight"]
        assert weight is not None
        nn.init.normal_(weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                weight[self.padding_idx].fill_(0)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch/x, seq] to [batch/x, seq/y, H/z]. Called by all ranks; ids are the same along y and z."""
        whole = _Lookup.apply(self._parameters["weight"], ids, self)
        along_y = self.table.style.all_gather
        return reduce_scatter(whole, self.table.context.mesh.axis(along_y.axis), along_y.dim)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, module: Embedding3D) -> Tensor:
        shard = module.table
        pending = shard.weight.start_all_gather(table.dtype)
        torch._assert_async(((ids >= 0) & (ids < module.num_embeddings)).all(), "an id is outside of the table")
        rows = shard.rows_of(ids)
        found = nn.functional.embedding(rows.clamp_max(shard.num_rows - 1), pending.wait()[0])
        ctx.module = module
        ctx.save_for_backward(ids)
        return found.masked_fill_((rows == shard.num_rows).unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shard, last = ctx.module.table, ctx.module.table.num_rows
        rows = shard.rows_of(ctx.saved_tensors[0], ignored=ctx.module.padding_idx)
        whole = torch.ops.aten.embedding_dense_backward(gradient.contiguous(), rows, last + 1, last, False)
        return shard.weight.start_reduce_scatter([whole[:last]]).wait()[0], None, None


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
    if not isinstance(module, Embedding3D):
        module.__class__ = Embedding3D
    module.table = _TableShard(module, context, style)  # type: ignore[assignment]
    dims = DimShard(module.num_embeddings, style.out_axes), DimShard(module.embedding_dim, style.in_axes)
    shard_parameters(module, {"weight": Shard(dims)}, context.mesh)


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
