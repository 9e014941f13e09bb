"""An attention's q, k and v projections, of which each rank holds those of its own heads.

`in_proj_weight` holds the three weights one after the other. On each rank it holds its parts of the three:

whole      q0 q1 k0 k1 v0 v1            y=0   q0 k0 v0            y=1   q1 k1 v1
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.tensor3d.layers.sharded_product import ShardedProduct
from lightning_hanayo.tensor3d.parallel_style import ParallelStyle
from lightning_hanayo.tensor3d.sharded_weight import StoredWeight
from lightning_hanayo.tensor3d.sharding import DimShard, Shard, fused_order
from lightning_hanayo.tensor3d.stage_context import StageContext

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_READERS = (0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)
"""which projections may read one tensor"""


class AttentionProjections:
    """The three projections of one `nn.MultiheadAttention`, which isn't sharded yet. `style` is that of all three."""

    def __init__(self, module: Any, context: StageContext, style: ParallelStyle, num_kv_heads: int) -> None:
        self.context = context
        self.style = style
        self.axes, mesh = style.between_axes, context.mesh
        self.num_heads = module.num_heads // mesh.size(self.axes)
        self.num_kv_heads = num_kv_heads // mesh.size(self.axes)
        q, kv = module.embed_dim, num_kv_heads * module.head_dim
        self.outs = (q, kv, kv)
        self.ins = (module.embed_dim, module.kdim, module.vdim)
        self.bias_sizes = [size // mesh.size(self.axes) for size in self.outs]
        bias = Shard((self._fused(self.axes),), style.replicated_axes)
        if module._qkv_same_embed_dim:
            matrix = self._fused(style.out_axes), DimShard(module.embed_dim, style.in_axes)
            self.shards = {"in_proj_weight": Shard(matrix), "in_proj_bias": bias}
        else:
            self.shards = {
                name: Shard((DimShard(out, style.out_axes), DimShard(in_, style.in_axes)))
                for name, out, in_ in zip(SEPARATE, self.outs, self.ins, strict=True)
            } | {"in_proj_bias": bias}
        self._stored = self._stored_weights(module)
        self._products: dict[tuple[int, ...], ShardedProduct] = {which: self._product(which) for which in _READERS}

    def _fused(self, axes: str) -> DimShard:
        """How the out-features of q, k and v are sharded over `axes`: each rank gets its part of all three."""
        return DimShard(sum(self.outs), axes, fused_order(self.outs, self.context.mesh.size(axes)))

    def _stored_weights(self, module: nn.Module) -> list[StoredWeight]:
        weights, start, size = [], 0, self.context.mesh.size
        for name, out, in_ in zip(SEPARATE, self.outs, self.ins, strict=True):
            stop = start + out // size(self.style.out_axes)
            shape = out // size(self.style.all_gather.axis), in_ // size(self.style.in_axes)
            if "in_proj_weight" in self.shards:
                weights.append(StoredWeight(module, shape, name="in_proj_weight", rows=slice(start, stop)))
            else:
                weights.append(StoredWeight(module, shape, name=name))
            start = stop
        return weights

    def _product(self, which: tuple[int, ...]) -> ShardedProduct:
        """The product of those projections that read one tensor. Only the query has the run's sequence length."""
        weight, along = self.context.weight(*(self._stored[i] for i in which)), self.style.all_gather
        along = along if which[0] == 0 else replace(along, is_sequence=False)
        return ShardedProduct(weight, self.context, along, self.style.reduce_scatter)

    def project(self, inputs: Sequence[Tensor], bias: Tensor | None) -> list[Tensor]:
        """Query, key and value to this rank's heads of q, k and v. A tensor that is several of them is gathered once.

        A key that isn't the query, as a decoder's memory, isn't padded.
        """
        outs: dict[int, Tensor] = {}
        for i, x in enumerate(inputs):
            if i not in outs:
                which = tuple(j for j in range(i, 3) if inputs[j] is x)
                outs |= dict(zip(which, self._products[which](x)[1:], strict=True))
        if bias is None:
            return [outs[i] for i in range(3)]
        return [outs[i] + own.to(outs[i].dtype) for i, own in enumerate(bias.split(self.bias_sizes))]

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
