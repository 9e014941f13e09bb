"""3-D parallel attention, in place of `nn.MultiheadAttention`: each rank attends with some heads, to whole sequences.

x [batch/x, seq/y, E/z]  --all-gather once-->  [batch/x, seq, E/z]  -->  q, k, v [batch/x, seq, E/(y z)]
                         --attention of heads/(y z)-->  [batch/x, seq, E/(y z)]  --out_proj-->  [batch/x, seq/y, E/z]
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from lightning_hanayo.divisibility import Divisibility, check_divisibility
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor_parallel.collectives import all_gather_replicated, all_reduce
from lightning_hanayo.tensor_parallel.layers.linear import ShardedProduct, guarded_weight, parallelize_linear
from lightning_hanayo.tensor_parallel.layers.norm import Sizes, rank_random_stream
from lightning_hanayo.tensor_parallel.product import SEQUENCE, SEQUENCE_FIRST, ParallelStyle
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard, fused_order, shard_module
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from lightning_hanayo.tensor_parallel.weights import StoredWeight

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_READERS = (0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)
"""which projections may read one tensor"""


class AttentionProjections:
    """The q, k and v projections of one `nn.MultiheadAttention`, which isn't sharded yet. All have this `style`.

    Each rank holds those of its own heads. `in_proj_weight` holds the three weights one after the other:

        whole      q0 q1 k0 k1 v0 v1            y=0   q0 k0 v0            y=1   q1 k1 v1
    """

    def __init__(self, module: Any, context: StageContext, style: ParallelStyle) -> None:
        self.context = context
        self.style = style
        self.axes, features, size = style.between_axes, module.embed_dim, context.mesh.size
        self.num_heads = module.num_heads // size(self.axes)
        is_fused = module._qkv_same_embed_dim
        names, rows = ("in_proj_weight",) * 3 if is_fused else SEPARATE, features // size(style.out_axes)
        out = self._fused(features, style.out_axes) if is_fused else DimShard(features, style.out_axes)
        self.shards = {"in_proj_bias": Shard((self._fused(features, self.axes),), style.replicated_axes)}
        stored = []
        for i, (name, in_) in enumerate(zip(names, (features, module.kdim, module.vdim), strict=True)):
            self.shards[name] = Shard((out, DimShard(in_, style.in_axes)))
            shape = features // size(style.all_gather.axis), in_ // size(style.in_axes)
            of_rows = slice(i * rows, (i + 1) * rows) if is_fused else None
            stored.append(StoredWeight(module, shape, name=name, rows=of_rows))
        self._products: dict[tuple[int, ...], ShardedProduct] = {}
        for which in _READERS:
            weight = context.weight(*(stored[i] for i in which))
            self._products[which] = ShardedProduct(weight, context, style.all_gather, style.reduce_scatter)

    def _fused(self, features: int, axes: str) -> DimShard:
        """How the out-features of q, k and v are sharded over `axes`: each rank gets its part of all three."""
        return DimShard(3 * features, axes, fused_order((features,) * 3, self.context.mesh.size(axes)))

    def project(self, inputs: Sequence[Tensor], bias: Tensor | None) -> list[Tensor]:
        """Query, key and value to this rank's heads of q, k and v. A tensor that is several is gathered once."""
        outs: dict[int, Tensor] = {}
        for i, x in enumerate(inputs):
            if i not in outs:
                which = tuple(j for j in range(i, 3) if inputs[j] is x)
                outs |= dict(zip(which, self._products[which](x)[1:], strict=True))
        if bias is None:
            return [outs[i] for i in range(3)]
        return [outs[i] + own.to(outs[i].dtype) for i, own in enumerate(bias.chunk(3))]

    def mask(self, attn_mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Combines both masks to one that is added to the scores, [batch or 1, heads or 1, seq or 1, S]."""
        parts = []
        if attn_mask is not None:
            additive = _additive(attn_mask, dtype)
            if additive.dim() == 3:
                mesh = self.context.mesh
                count = self.num_heads * mesh.size(self.axes)
                heads = self._own_samples(additive.unflatten(0, (-1, count)))
                additive = heads.chunk(mesh.size(self.axes), 1)[mesh.index(self.axes)]
            parts.append(additive)
        if padding is not None:
            parts.append(self._own_samples(_additive(padding, dtype))[:, None, None])
        return sum(parts[1:], parts[0]) if parts else None

    def _own_samples(self, mask: Tensor) -> Tensor:
        """Returns the samples that this rank attends to, of a mask for each sample of x."""
        if self.style.reduce_scatter.dim == -1:
            return mask
        axis = self.context.mesh.axis(self.style.reduce_scatter.axis)
        return mask.chunk(axis.size)[axis.rank]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask, whose True means "not allowed", to 0 and -inf; a mask of numbers stays."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


class MultiheadAttention3D(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` whose queries, keys and values are sharded residual streams.

    Masks are whole: those of the samples of this rank's x, for whole sequences and all heads. `need_weights` sends the
    weights between ranks.

    Example:
        >>> attention = MultiheadAttention3D(768, 12, batch_first=True, context=context)
        >>> y, _ = attention(x, x, x, need_weights=False)

    Args:
        embed_dim: features of the residual stream.
        num_heads: of the whole attention.
        *args: those of `nn.MultiheadAttention`.
        context: of the stage.
        style: of q, k and v; None: sequences are sharded along y, whichever dimension they are.
        **kwargs: those of `nn.MultiheadAttention`.

    Raises:
        UnsupportedError: an option adds keys.
        HanayoError: heads or features don't divide.
    """

    projections: AttentionProjections
    in_proj_weight = property(partial(guarded_weight, name="in_proj_weight"))
    q_proj_weight = property(partial(guarded_weight, name="q_proj_weight"))
    k_proj_weight = property(partial(guarded_weight, name="k_proj_weight"))
    v_proj_weight = property(partial(guarded_weight, name="v_proj_weight"))

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        context: StageContext,
        style: ParallelStyle | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        parallelize_attention(self, context, style)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Called by all ranks of the mesh, in the same order. Returns weights of this rank's samples only.

        Raises:
            UnsupportedError: the query has no batch dimension.
            HanayoError: `is_causal` without `attn_mask`.
        """
        if query.dim() != 3:
            raise UnsupportedError(f"attention over the cube takes [batch, seq, features], not {tuple(query.shape)}")
        if is_causal and attn_mask is None:
            raise HanayoError("is_causal is a hint about attn_mask: give that as well, as to nn.MultiheadAttention")
        own = self.projections
        projected = own.project((query, key, value), self._parameters["in_proj_bias"])
        q, k, v = (self._split_heads(x, own.num_heads) for x in projected)
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else own.mask(attn_mask, key_padding_mask, q.dtype)
        p = self.dropout if self.training else 0.0
        weights = None
        with rank_random_stream(own.context, q.device) if p > 0 else nullcontext():
            if need_weights:
                scores = (q / math.sqrt(q.shape[-1])) @ k.mT
                weights = (scores if mask is None else scores + mask).softmax(-1)
                weights = dropout(weights, p) if p > 0 else weights
                y = weights @ v
            else:
                y = scaled_dot_product_attention(q, k, v, mask, p, is_causal)
        y = y.transpose(1, 2) if self.batch_first else y.permute(2, 0, 1, 3)
        out: Tensor = self.out_proj(y.flatten(-2))
        if weights is None:
            return out, None
        axis = own.context.mesh.axis(own.axes)
        if average_attn_weights:
            return out, all_reduce(weights.mean(1) / axis.size, axis)
        return out, all_gather_replicated(weights, axis, 1)

    def _split_heads(self, x: Tensor, count: int) -> Tensor:
        """[batch, seq, heads * d], or sequence first, to [batch, heads, seq, d]."""
        heads: Tensor = x.unflatten(-1, (count, -1))
        return heads.permute(0, 2, 1, 3) if self.batch_first else heads.permute(1, 2, 0, 3)


def parallelize_attention(
    module: nn.MultiheadAttention, context: StageContext, style: ParallelStyle | None = None
) -> None:
    """Parallelize an `nn.MultiheadAttention` in place. Parameter objects, names and attributes stay.

    Raises:
        UnsupportedError: it has an option that adds keys.
        HanayoError: its heads or features don't divide.
    """
    style = (SEQUENCE if module.batch_first else SEQUENCE_FIRST) if style is None else style
    if (style.all_gather.dim == 0) == module.batch_first and style.reduce_scatter.dim == -1:
        raise HanayoError(f"the style {style} is for batch_first={not module.batch_first}")
    if style.reduce_scatter.dim == 0 and not module.batch_first:
        raise UnsupportedError("attention whose batch is sharded along y and z needs batch_first=True")
    required = [Divisibility(type(module).__name__, *one) for one in attention_sizes(module, style)]
    check_divisibility(required, context.mesh.sizes)
    projections = AttentionProjections(module, context, style)
    shard_module(module, MultiheadAttention3D, projections.shards, context.mesh, projections=projections)
    parallelize_linear(module.out_proj, context, style.row_parallel())


def attention_sizes(module: Any, style: ParallelStyle = SEQUENCE) -> Sizes:
    """The sizes that must divide.

    Raises:
        UnsupportedError: the module has an option that adds keys.
    """
    for option, value in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
        if value:
            raise UnsupportedError(f"attention over the cube can't have {option}=True")
    inputs = {"query": module.embed_dim, "key": module.kdim, "value": module.vdim}
    return (
        ("heads", module.num_heads, style.between_axes),
        ("features", module.embed_dim, style.out_axes),
        *((f"features of a {name}", size, style.in_axes) for name, size in inputs.items()),
    )
