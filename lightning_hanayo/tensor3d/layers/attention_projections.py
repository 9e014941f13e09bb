"""An attention's q, k and v projections, of which each rank holds those of its own heads.

`in_proj_weight` holds the three weights one after the other. On each rank it holds its parts of the three:

whole      q0 q1 k0 k1 v0 v1            y=0   q0 k0 v0            y=1   q1 k1 v1
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.tensor3d.layers.shared_input import SharedInput
from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.parallel_style import ParallelStyle
from lightning_hanayo.tensor3d.product import ProductArgs, product
from lightning_hanayo.tensor3d.sharding import DimShard, Shard
from lightning_hanayo.tensor3d.stage_context import StageContext
from lightning_hanayo.tensor3d.weight import ShardedWeight, copy_with_own_weight

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class _Projection:
    """One of q, k and v: a linear layer whose weight is some rows of a parameter.

    Args:
        module: has the parameter.
        projections: of the module.
        name: the parameter's name.
        rows: this rank's rows of the parameter; None: all of them.
        sizes: out- and in-features of the whole projection.
    """

    def __init__(
        self,
        module: nn.Module,
        projections: "AttentionProjections",
        name: str,
        rows: slice | None,
        sizes: tuple[int, int],
    ) -> None:
        context, style = projections.context, projections.style
        mesh = context.mesh
        self._projections = projections
        self.weight = ShardedWeight(
            module,
            mesh.axis("x"),
            (sizes[0] // mesh.size(style.all_gather.axis), sizes[1] // mesh.size(style.in_axes)),
            transposed=False,
            pending_gradients=context.pending_gradients,
            queue=context.queue,
            name=name,
            rows=rows,
        )

    def copied(self, projections: "AttentionProjections", memo: Any) -> "_Projection":
        """Returns a copy for a deep copy of the module."""
        twin = copy_with_own_weight(self, memo)
        twin._projections = projections
        return twin

    def __call__(self, x: Tensor, shared_input: SharedInput, bias: Tensor | None) -> Tensor:
        """[.., seq, K/z] to [.., seq, N/(y z)]."""
        context, style = self._projections.context, self._projections.style
        args = ProductArgs(
            self.weight,
            None,
            context.bind(style.reduce_scatter),
            context.keep,
            shared_input.saved(x),
            context.prefetch_order.record(self.weight),
            context.num_pieces,
        )
        y = product(x, args)
        return y if bias is None else y + bias.to(y.dtype)


class AttentionProjections:
    """The three projections of one attention.

    Args:
        module: an `nn.MultiheadAttention` that isn't sharded yet.
        context: of the stage.
        style: of q, k and v; out_proj is its row-parallel counterpart.
        num_kv_heads: of the whole attention.
    """

    def __init__(self, module: Any, context: StageContext, style: ParallelStyle, num_kv_heads: int) -> None:
        self.context = context
        self.style = style
        mesh = context.mesh
        self.axes = style.all_gather.axis + (style.reduce_scatter.axis if style.reduce_scatter.dim == -1 else "")
        self.num_heads = module.num_heads // mesh.size(self.axes)
        self.num_kv_heads = num_kv_heads // mesh.size(self.axes)
        q, kv = module.embed_dim, num_kv_heads * module.head_dim
        self.outs = (q, kv, kv)
        self.ins = (module.embed_dim, module.kdim, module.vdim)
        self.bias_sizes = [size // mesh.size(self.axes) for size in self.outs]
        bias = Shard((self._fused(self.outs, mesh, self.axes),), "".join(a for a in "xyz" if a not in self.axes))
        if module._qkv_same_embed_dim:
            matrix = self._fused(self.outs, mesh, style.out_axes), DimShard(module.embed_dim, style.in_axes)
            self.shards = {"in_proj_weight": Shard(matrix), "in_proj_bias": bias}
        else:
            self.shards = {
                name: Shard((DimShard(out, style.out_axes), DimShard(in_, style.in_axes)))
                for name, out, in_ in zip(SEPARATE, self.outs, self.ins, strict=True)
            } | {"in_proj_bias": bias}
        self.projections = self._projections(module, mesh)

    def __deepcopy__(self, memo: Any) -> "AttentionProjections":
        twin = copy(self)
        twin.projections = [projection.copied(twin, memo) for projection in self.projections]
        return twin

    @staticmethod
    def _fused(sizes: Sequence[int], mesh: Mesh, axes: str) -> DimShard:
        """How a dimension that holds q, k and v of these sizes is sharded: each rank gets its part of all three."""
        count, starts = mesh.size(axes), (0, sizes[0], sizes[0] + sizes[1])
        order = [
            start + i * (size // count) + j
            for i in range(count)
            for start, size in zip(starts, sizes, strict=True)
            for j in range(size // count)
        ]
        return DimShard(sum(sizes), axes, tuple(order))

    def _projections(self, module: nn.Module, mesh: Mesh) -> list[_Projection]:
        projections, start = [], 0
        for name, out, in_ in zip(SEPARATE, self.outs, self.ins, strict=True):
            stop = start + out // mesh.size(self.style.out_axes)
            if "in_proj_weight" in self.shards:
                projections.append(_Projection(module, self, "in_proj_weight", slice(start, stop), (out, in_)))
            else:
                projections.append(_Projection(module, self, name, None, (out, in_)))
            start = stop
        return projections

    def project(self, inputs: Sequence[Tensor], bias: Tensor | None) -> list[Tensor]:
        """Query, key and value to this rank's heads of q, k and v. A tensor that is several of them is gathered once.

        Only the query is of the run's sequence length. Another key, as a decoder's memory, isn't padded.
        """
        biases = (None,) * 3 if bias is None else bias.split(self.bias_sizes)
        gathered: list[tuple[Tensor, SharedInput, Tensor]] = []
        outs = []
        for i, (x, projection, own_bias) in enumerate(zip(inputs, self.projections, biases, strict=True)):
            found = next(((shared, whole) for seen, shared, whole in gathered if seen is x), None)
            if found is None:
                along = self.style.all_gather if i == 0 else replace(self.style.all_gather, is_sequence=False)
                shared = SharedInput(self.context, along)
                found = shared, shared.all_gather(as_autocast(x))
                gathered.append((x, *found))
            outs.append(projection(found[1], found[0], own_bias))
        return outs

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
