"""The attention over the grid, in place of `nn.MultiheadAttention`: each rank has whole sequences, and some heads.

x [batch/x, seq/y, E/z]  --once-->  [batch/x, seq, E/z]  -->  q, k, v [batch/x, seq, E/(y z)]  -->  heads/(y z)
                                                         -->  [batch/x, seq, E/(y z)]          -->  out_proj, back
"""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor3d.collectives import assemble, total
from lightning_hanayo.tensor3d.divisibility import Divisibility, check
from lightning_hanayo.tensor3d.layers.attention_heads import SEPARATE, Heads
from lightning_hanayo.tensor3d.layers.dropout import own_stream
from lightning_hanayo.tensor3d.layers.guarded_weight import guarded_weight
from lightning_hanayo.tensor3d.layers.linear import spread
from lightning_hanayo.tensor3d.parallel_style import SEQUENCE, SEQUENCE_FIRST, ParallelStyle
from lightning_hanayo.tensor3d.sharding import Shard
from lightning_hanayo.tensor3d.stage_context import StageContext


class MultiheadAttention3D(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` over the grid. Arguments as there; queries, keys and values are residual streams.

    Masks are those of the samples of x, with whole sequences and all heads. `need_weights` sends them between ranks.

    Example:
        >>> attention = MultiheadAttention3D(768, 12, batch_first=True, setting=setting)
        >>> y, _ = attention(x, x, x, need_weights=False)

    Args:
        embed_dim: as there, and so are all that aren't named below.
        num_heads: of the whole.
        setting: what the layers of a stage share.
        layout: of q, k and v; None: the sequences are cut along y, whichever dimension they are.
        num_kv_heads: for several q heads on each k and v head.
    """

    heads: Heads
    in_proj_weight = property(partial(guarded_weight, name="in_proj_weight"))
    q_proj_weight = property(partial(guarded_weight, name="q_proj_weight"))
    k_proj_weight = property(partial(guarded_weight, name="k_proj_weight"))
    v_proj_weight = property(partial(guarded_weight, name="v_proj_weight"))

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        setting: StageContext,
        layout: ParallelStyle | None = None,
        num_kv_heads: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        spread_attention(self, setting, layout)

    @property
    def shards(self) -> dict[str, Shard]:
        """How each parameter is cut; out_proj has its own."""
        return {name: shard for name, shard in self.heads.shards.items() if self._parameters.get(name) is not None}

    def _reset_parameters(self) -> None:
        """While it is made, before it is cut: here the k and v of fewer heads get smaller."""
        removed = 2 * (self.num_heads - self._kv_heads) * self.head_dim
        for name in ("in_proj_weight", *SEPARATE[1:], "in_proj_bias"):
            parameter = self._parameters.get(name)
            if parameter is not None and removed:
                rows = len(parameter) - (removed if "in_proj" in name else removed // 2)
                parameter.data = parameter.data[:rows].clone()
        for name in ("in_proj_weight", *SEPARATE):
            parameter = self._parameters.get(name)
            if parameter is not None:
                nn.init.xavier_uniform_(parameter)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

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
        """Called by all ranks of the grid, in the same order; the weights are those of this rank's samples."""
        if query.dim() != 3:
            raise UnsupportedError(f"attention over the cube takes [batch, seq, features], not {tuple(query.shape)}")
        if is_causal and attn_mask is None:
            raise HanayoError("is_causal is a hint about attn_mask: give that as well, as to nn.MultiheadAttention")
        own = self.heads
        q, k, v = (
            self._heads(x, count)
            for x, count in zip(
                own.project((query, key, value), self._parameters["in_proj_bias"]),
                (own.num_heads, own.num_kv_heads, own.num_kv_heads),
                strict=True,
            )
        )
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else own.mask(attn_mask, key_padding_mask, q.dtype)
        p = self.dropout if self.training else 0.0
        weights = None
        with own_stream(own.setting, q.device) if p > 0 else nullcontext():
            if need_weights:
                y, weights = _weighed(q, k, v, mask, p)
            else:
                is_grouped = q.shape[1] != k.shape[1]
                y = scaled_dot_product_attention(q, k, v, mask, p, is_causal, enable_gqa=is_grouped)
        y = y.transpose(1, 2) if self.batch_first else y.permute(2, 0, 1, 3)
        out: Tensor = self.out_proj(y.flatten(-2))
        return out, None if weights is None else self._together(weights, average_attn_weights)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        """[batch, seq, heads * d], or sequence first, to [batch, heads, seq, d]."""
        heads: Tensor = x.unflatten(-1, (count, -1))
        return heads.permute(0, 2, 1, 3) if self.batch_first else heads.permute(1, 2, 0, 3)

    def _together(self, weights: Tensor, average: bool) -> Tensor:
        axis = self.heads.setting.grid.axis(self.heads.axes)
        if average:
            return total(weights.mean(1) / axis.size, axis)
        return assemble(weights, axis, 1)


def _weighed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    """[batch, heads, seq, d], and the weights [batch, heads, seq, S] as they were used."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v)) if group > 1 else (k, v)
    scores = (q / math.sqrt(q.shape[-1])) @ k.mT
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = dropout(weights, p) if p > 0 else weights
    return weights @ v, weights


def spread_attention(module: nn.MultiheadAttention, setting: StageContext, layout: ParallelStyle | None = None) -> None:
    """Spread an `nn.MultiheadAttention` over the grid, in place: parameter objects, names and attributes stay.

    Raises:
        UnsupportedError: it has an option that adds keys.
        HanayoError: its heads or features don't divide.
    """
    for option, value in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
        if value:
            raise UnsupportedError(f"attention over the cube can't have {option}=True")
    layout = (SEQUENCE if module.batch_first else SEQUENCE_FIRST) if layout is None else layout
    if (layout.gather.dim == 0) == module.batch_first and layout.scatter.dim == -1:
        raise HanayoError(f"the layout {layout} is for batch_first={not module.batch_first}")
    if layout.scatter.dim == 0 and not module.batch_first:
        raise UnsupportedError("attention over a batch-split cube needs batch_first=True")
    num_kv_heads = getattr(module, "_kv_heads", module.num_heads)
    heads = Heads(module, setting, layout, num_kv_heads)
    _check(module, heads, num_kv_heads)
    if not isinstance(module, MultiheadAttention3D):
        module.__class__ = MultiheadAttention3D
    module.heads = heads  # type: ignore[assignment]
    for name, shard in heads.shards.items():
        parameter = module._parameters.get(name)
        if parameter is not None:
            parameter.data = shard.of(parameter.data, setting.grid)
    spread(module.out_proj, setting, layout.swapped())


def _check(module: nn.MultiheadAttention, heads: Heads, num_kv_heads: int) -> None:
    rows, columns, name = heads.layout.rows, heads.layout.columns, type(module).__name__
    needs = [
        Divisibility(name, "heads", module.num_heads, heads.axes),
        Divisibility(name, "heads of k and v", num_kv_heads, heads.axes),
        *(
            Divisibility(name, f"features of {which}", size, rows)
            for which, size in zip("qkv", heads.outs, strict=True)
        ),
        *(
            Divisibility(name, f"features into {which}", size, columns)
            for which, size in zip("qkv", heads.ins, strict=True)
        ),
    ]
    check(needs, heads.setting.grid.sizes)
