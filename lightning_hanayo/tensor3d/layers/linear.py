"""The linear layer over the grid, in place of `nn.Linear` and of Hugging Face's `Conv1D`."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from lightning_hanayo.tensor3d.boundary.shared_input import SharedInput
from lightning_hanayo.tensor3d.divisibility import Divisibility, check
from lightning_hanayo.tensor3d.layers.guarded_weight import guarded_weight
from lightning_hanayo.tensor3d.layers.product import Call, product
from lightning_hanayo.tensor3d.layers.weight import Weight, with_own_weight
from lightning_hanayo.tensor3d.parallel_style import SEQUENCE, ParallelStyle
from lightning_hanayo.tensor3d.sharding import Cut, Shard
from lightning_hanayo.tensor3d.stage_context import StageContext


class Spread:
    """One linear layer's part in the grid: how its parameters are cut, and how it is called.

    Args:
        setting: the stage's.
        layout: where its input comes from and its output goes.
        sizes: out and in features of the whole layer.
        order: its out-features, in the order in which they are cut; None: as they are.
        entry: where its input has been brought together already; None: it does that itself.
    """

    axis = "x"
    """along which the weight is brought together"""

    def __init__(
        self,
        setting: StageContext,
        layout: ParallelStyle,
        sizes: tuple[int, int],
        order: tuple[int, ...] | None,
        entry: SharedInput | None,
    ) -> None:
        self.setting = setting
        self.layout = layout
        self.entry = entry
        self.weight: Weight | None = None
        self.shards: dict[str, Shard] = {}
        out, in_ = sizes
        grid = setting.grid
        self.shape = -(-out // grid.size(layout.gather.axis)), -(-in_ // grid.size(layout.columns))
        rows, columns = Cut(out, layout.rows, order), Cut(in_, layout.columns)
        self.matrix = Shard((rows, columns))
        by_features = layout.scatter.dim == -1
        along = layout.gather.axis + (layout.scatter.axis if by_features else "")
        self.vector = Shard((Cut(out, along, order),), "".join(a for a in "xyz" if a not in along))

    def __deepcopy__(self, memo: Any) -> "Spread":
        return with_own_weight(self, memo)

    def connect(self, module: nn.Module, *, transposed: bool) -> None:
        """Cut the module's parameters, and keep its weight at hand."""
        self.shards = {"weight": Shard(self.matrix.cuts[::-1]) if transposed else self.matrix, "bias": self.vector}
        for name, shard in self.shards.items():
            parameter = module._parameters.get(name)
            if parameter is not None:
                parameter.data = shard.of(parameter.data, self.setting.grid)
        self.weight = Weight(
            module,
            self.setting.grid.axis(self.axis),
            self.shape,
            transposed=transposed,
            late=self.setting.late,
            queue=self.setting.queue,
        )

    def call(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's forward."""
        assert self.weight is not None
        setting, layout, entry = self.setting, self.layout, self.entry
        call = Call(
            self.weight,
            setting.along(layout.gather) if entry is None else None,
            setting.along(layout.scatter),
            setting.keep,
            entry.source_of(x) if entry is not None else None,
            setting.order.after(self.weight),
            setting.num_pieces,
        )
        y = product(x, call)
        return y if bias is None else y + bias.to(y.dtype)


class SpreadLayer(nn.Module):
    """What all linear layers over the grid have in common, whatever they were."""

    spread: Spread
    weight = property(guarded_weight)

    @property
    def shards(self) -> dict[str, Shard]:
        """How each parameter is cut."""
        return {name: shard for name, shard in self.spread.shards.items() if self._parameters.get(name) is not None}

    def forward(self, x: Tensor) -> Tensor:
        """Called by all ranks of the grid, in the same order."""
        return self.spread.call(x, self._parameters["bias"])


class Linear3D(SpreadLayer, nn.Linear):
    """y = x W^T + b, with W, x and y each at 1/(x y z) per rank.

    In the default layout x is [batch/x, seq/y, in/z], y [batch/x, seq, out/(y z)]; `layout.swapped()` leads back.
    Values don't depend on the grid: they are made whole, from the default generator, and cut.

    Example:
        >>> up = Linear3D(64, 256, setting=setting)
        >>> down = Linear3D(256, 64, setting=setting, layout=SEQUENCE.swapped())

    Args:
        in_features: of the whole layer, and so are all that follow.
        out_features: must divide as `layout` says.
        bias: whether there is one. Its gradient is summed over ranks once per batch, by whoever owns the step.
        setting: what the layers of a stage share.
        layout: a value; nothing is inferred from the order in which layers are made.
        order: the out-features in the order in which they are cut: fused projections lie head by head.
        entry: where the input is brought together for several layers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        setting: StageContext,
        layout: ParallelStyle = SEQUENCE,
        order: Sequence[int] | None = None,
        entry: SharedInput | None = None,
        **factory: Any,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, **factory)
        spread(self, setting, layout, order=order, entry=entry)

    def reset_parameters(self) -> None:
        """While the layer is made, before it is cut."""
        weight = self._parameters["weight"]
        assert weight is not None
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)


def spread(
    module: nn.Module,
    setting: StageContext,
    layout: ParallelStyle = SEQUENCE,
    *,
    order: Sequence[int] | None = None,
    entry: SharedInput | None = None,
) -> None:
    """Spread an `nn.Linear` or a `Conv1D` over the grid, in place: parameter objects, names and attributes stay.

    Raises:
        HanayoError: its features don't divide.
    """
    (out, in_), name = features(module), type(module).__name__
    part = Spread(setting, layout, (out, in_), None if order is None else tuple(order), entry)
    needs = [
        Divisibility(name, "out features", out, part.vector.axes),
        Divisibility(name, "in features", in_, layout.columns),
    ]
    check(needs, setting.grid.sizes)
    attach(module, part)


def features(module: nn.Module) -> tuple[int, int]:
    """Out and in features of a dense `nn.Linear` or `Conv1D`."""
    weight = module._parameters["weight"]
    assert weight is not None
    out, in_ = weight.shape if isinstance(module, nn.Linear) else reversed(weight.shape)
    return out, in_


def attach(module: nn.Module, part: Spread) -> None:
    """Give the layer its part in the grid."""
    if not isinstance(module, SpreadLayer):
        module.__class__ = Linear3D if type(module) is nn.Linear else _spread_class(type(module))  # type: ignore[arg-type]
    module.spread = part  # type: ignore[assignment]
    part.connect(module, transposed=not isinstance(module, nn.Linear))


@lru_cache
def _spread_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A `Conv1D` over the grid, which is one still: its parent may look."""
    return type(f"{kind.__name__}3D", (SpreadLayer, kind), {"__doc__": f"A {kind.__name__} over the grid."})
