"""The heads: an attention's q, k and v over the grid, each rank with those of its heads.

`in_proj_weight` holds three weights, one behind the other. On each rank it holds the parts of the three:

whole      q0 q1 k0 k1 v0 v1            y=0   q0 k0 v0            y=1   q1 k1 v1
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.tensor3d.boundary.shared_input import SharedInput
from lightning_hanayo.tensor3d.layers.product import Call, product
from lightning_hanayo.tensor3d.layers.weight import Weight, with_own_weight
from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.parallel_style import ParallelStyle
from lightning_hanayo.tensor3d.sharding import Cut, Shard
from lightning_hanayo.tensor3d.stage_context import StageContext

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class _Projection:
    """One of q, k and v: a linear layer whose weight is some rows of a parameter.

    Args:
        module: has the parameter.
        part: the module's.
        name: the parameter's.
        rows: this rank's, of the parameter; None: all of them.
        sizes: out and in features, of the whole.
    """

    def __init__(self, module: nn.Module, part: "Heads", name: str, rows: slice | None, sizes: tuple[int, int]) -> None:
        setting, layout = part.setting, part.layout
        grid = setting.grid
        shape = sizes[0] // grid.size(layout.gather.axis), sizes[1] // grid.size(layout.columns)
        self._part = part
        self.weight = Weight(
            module,
            grid.axis("x"),
            shape,
            transposed=False,
            late=setting.late,
            queue=setting.queue,
            name=name,
            rows=rows,
        )

    def copied(self, part: "Heads", memo: Any) -> "_Projection":
        """For a copy of the module."""
        twin = with_own_weight(self, memo)
        twin._part = part
        return twin

    def __call__(self, x: Tensor, entry: SharedInput, bias: Tensor | None) -> Tensor:
        """[.., seq, K/z] to [.., seq, N/(y z)]."""
        setting, layout = self._part.setting, self._part.layout
        scatter, following = setting.along(layout.scatter), setting.order.after(self.weight)
        source = entry.source_of(x)
        y = product(x, Call(self.weight, None, scatter, setting.keep, source, following, setting.num_pieces))
        return y if bias is None else y + bias.to(y.dtype)


class Heads:
    """One attention's, in the grid.

    Args:
        module: an `nn.MultiheadAttention`, not cut yet.
        setting: the stage's.
        layout: of q, k and v; out_proj has it swapped.
        num_kv_heads: of the whole.
    """

    def __init__(self, module: Any, setting: StageContext, layout: ParallelStyle, num_kv_heads: int) -> None:
        self.setting = setting
        self.layout = layout
        grid = setting.grid
        self.axes = layout.gather.axis + (layout.scatter.axis if layout.scatter.dim == -1 else "")
        self.num_heads = module.num_heads // grid.size(self.axes)
        self.num_kv_heads = num_kv_heads // grid.size(self.axes)
        q, kv = module.embed_dim, num_kv_heads * module.head_dim
        self.outs = (q, kv, kv)
        self.ins = (module.embed_dim, module.kdim, module.vdim)
        self.biases = [size // grid.size(self.axes) for size in self.outs]
        bias = Shard((self._cut(self.outs, grid, self.axes),), "".join(a for a in "xyz" if a not in self.axes))
        if module._qkv_same_embed_dim:
            matrix = self._cut(self.outs, grid, layout.rows), Cut(module.embed_dim, layout.columns)
            self.shards = {"in_proj_weight": Shard(matrix), "in_proj_bias": bias}
        else:
            self.shards = {
                name: Shard((Cut(out, layout.rows), Cut(in_, layout.columns)))
                for name, out, in_ in zip(SEPARATE, self.outs, self.ins, strict=True)
            } | {"in_proj_bias": bias}
        self.projections = self._projections(module, grid)

    def __deepcopy__(self, memo: Any) -> "Heads":
        twin = copy(self)
        twin.projections = [projection.copied(twin, memo) for projection in self.projections]
        return twin

    @staticmethod
    def _cut(sizes: Sequence[int], grid: Mesh, axes: str) -> Cut:
        """Of what holds q, k and v of these sizes: each rank gets its part of all three."""
        count, starts = grid.size(axes), (0, sizes[0], sizes[0] + sizes[1])
        order = [
            start + i * (size // count) + j
            for i in range(count)
            for start, size in zip(starts, sizes, strict=True)
            for j in range(size // count)
        ]
        return Cut(sum(sizes), axes, tuple(order))

    def _projections(self, module: nn.Module, grid: Mesh) -> list[_Projection]:
        projections, start = [], 0
        for name, out, in_ in zip(SEPARATE, self.outs, self.ins, strict=True):
            stop = start + out // grid.size(self.layout.rows)
            if "in_proj_weight" in self.shards:
                projections.append(_Projection(module, self, "in_proj_weight", slice(start, stop), (out, in_)))
            else:
                projections.append(_Projection(module, self, name, None, (out, in_)))
            start = stop
        return projections

    def project(self, inputs: Sequence[Tensor], bias: Tensor | None) -> list[Tensor]:
        """Query, key and value, each brought together once, to this rank's heads of q, k and v."""
        biases = (None,) * 3 if bias is None else bias.split(self.biases)
        entered: list[tuple[Tensor, SharedInput, Tensor]] = []
        outs = []
        for i, (x, projection, own) in enumerate(zip(inputs, self.projections, biases, strict=True)):
            found = next(((entry, whole) for seen, entry, whole in entered if seen is x), None)
            if found is None:
                # a memory isn't padded: its length is another one than that of the sequences under way
                entry = SharedInput(self.setting if i == 0 else replace(self.setting, length=None), self.layout.gather)
                found = entry, entry.enter(as_autocast(x))
                entered.append((x, *found))
            outs.append(projection(found[1], found[0], own))
        return outs

    def own_samples(self, mask: Tensor) -> Tensor:
        """Of a mask for each sample of x, what this rank attends with."""
        if self.layout.scatter.dim == -1:
            return mask
        axis = self.setting.grid.axis(self.layout.scatter.axis)
        return mask.chunk(axis.size)[axis.place]

    def mask(self, attn_mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Both as one that is added, [batch or 1, heads or 1, seq or 1, S]."""
        parts = []
        if attn_mask is not None:
            own = _additive(attn_mask, dtype)
            if own.dim() == 3:
                grid = self.setting.grid
                count = self.num_heads * grid.size(self.axes)
                heads = self.own_samples(own.unflatten(0, (-1, count)))
                own = heads.chunk(grid.size(self.axes), 1)[grid.index(self.axes)]
            parts.append(own)
        if padding is not None:
            parts.append(self.own_samples(_additive(padding, dtype))[:, None, None])
        return sum(parts[1:], parts[0]) if parts else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """True, which is "not allowed", to -inf; numbers as they are."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
