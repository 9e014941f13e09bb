"""The known block: one whose class is registered, checked against its kind, and spread with its own code."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from lightning_hanayo.linear_modules import is_linear
from lightning_hanayo.tensor3d.boundary.gathered_forward import wrap
from lightning_hanayo.tensor3d.boundary.shared_input import SharedInput
from lightning_hanayo.tensor3d.convert.eligibility import Owners, has_hooks, has_own_forward, obstacle
from lightning_hanayo.tensor3d.convert.report import Row, called, kind_of
from lightning_hanayo.tensor3d.convert.specs.layers import LayerSpec, layer_kind, leave, works_on_parts
from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, Part, attribute, set_attribute
from lightning_hanayo.tensor3d.divisibility import Divisibility
from lightning_hanayo.tensor3d.layers.linear import features, spread
from lightning_hanayo.tensor3d.parallel_style import SEQUENCE, SEQUENCE_FIRST, ParallelStyle
from lightning_hanayo.tensor3d.sharding import Cut, Shard
from lightning_hanayo.tensor3d.stage_context import StageContext

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

_Layer = tuple[str, nn.Module, LayerSpec]
"""with its path in the block"""


class Unlike(Exception):
    """A block isn't what its kind describes; the message says which part, and why."""


class RegisteredBlock:
    """One block.

    Args:
        block: of the class that `kind` describes.
        kind: its description.
        number: the block's, in the stack.
        name: qualified, for messages.
    """

    def __init__(self, block: nn.Module, kind: BlockSpec, number: int, name: str) -> None:
        self.block = block
        self.kind = kind
        self.number = number
        self.name = name

    @property
    def streams(self) -> tuple[str, ...]:
        """The forward's arguments that carry residual streams."""
        return self.kind.streams

    @property
    def batch_first(self) -> bool:
        """Whether they are [batch, seq, h]."""
        return self.kind.batch_first is None or self.kind.batch_first(self.block)

    def check(self, owners: Owners) -> None:
        """See that the block is in all parts what its kind describes.

        Raises:
            Unlike: it isn't.
        """
        for path in (*self._first(), *self.kind.second):
            self._check_linear(path, owners)
        for path, module in self.block.named_modules():
            if has_hooks(module) or has_own_forward(module):
                raise Unlike(f"{self._named(path)} has hooks or a forward of its own, which would see parts of tensors")
        for path, module, known in self._layers():
            if any(owners.shared(part) for part in module.modules()):
                raise Unlike(f"{self._named(path)} shares a parameter with another module")
            if why := known.obstacle(module):
                raise Unlike(f"{self._named(path)}: {why}")
        for path in self.kind.functions:
            self._check_function(path)
        for path, expected in self.kind.expects.items():
            if (got := self._attribute(path)) != expected:
                raise Unlike(f"{self._named(path)} is {got!r}, where {expected!r} is expected")

    def needs(self) -> Iterator[Divisibility]:
        """What must divide over the grid."""
        for part in self.kind.parts:
            owner = self.block.get_submodule(part.path)
            for path in part.first:
                where = _joined(part.path, path)
                out, in_ = features(self.block.get_submodule(where))
                what, size = "features", out // part.fused
                if part.head_size is not None:
                    what, size = "heads", size // _head_size(owner, part)
                yield Divisibility(self._named(where), what, size, "yz")
                yield Divisibility(self._named(where), "in-features", in_, "z")
        for path in self.kind.second:
            out, in_ = features(self.block.get_submodule(path))
            yield Divisibility(self._named(path), "out-features", out, "z")
            yield Divisibility(self._named(path), "in-features", in_, "yz")
        for path, module, known in self._layers():
            for what, size, axes in known.sizes(module):
                yield Divisibility(self._named(path), what, size, axes)

    def rows(self) -> Iterator[Row]:
        """What becomes of each layer, in the block's order."""
        what = dict.fromkeys(self._first(), "3-D, first") | dict.fromkeys(self.kind.second, "3-D, second")
        what |= dict.fromkeys(self._whole(), "whole on each rank")
        what |= {path: "3-D" for path, _, known in self._layers() if known.spread is not leave}
        for path, module in self.block.named_modules():
            if path in what:
                yield Row(self.number, path, kind_of(module), what[path])

    def install(self, setting: StageContext) -> None:
        """Spread it over the grid, in place."""
        layout = SEQUENCE if self.batch_first else SEQUENCE_FIRST
        layers = list(self._layers())
        for part in self.kind.parts:
            _spread_part(self.block.get_submodule(part.path), part, setting, layout)
        for path in self.kind.second:
            spread(self.block.get_submodule(path), setting, layout.swapped())
        for _, module, known in layers:
            known.spread(module, setting)
        for path, value in self.kind.sets.items():
            set_attribute(self.block, path, value)

    def _first(self) -> list[str]:
        return [_joined(part.path, path) for part in self.kind.parts for path in part.first]

    def _whole(self) -> list[str]:
        return [_joined(part.path, path) for part in self.kind.parts for path in part.whole]

    def _named(self, path: str) -> str:
        return _joined(self.name, path)

    def _attribute(self, path: str) -> Any:
        try:
            return attribute(self.block, path)
        except AttributeError:
            raise Unlike(f"{self.name} has no {path}") from None

    def _check_linear(self, path: str, owners: Owners) -> None:
        try:
            module = self.block.get_submodule(path)
        except AttributeError:
            raise Unlike(f"{self.name} has no {path}") from None
        if not is_linear(module):
            raise Unlike(f"{self._named(path)} is a {called(type(module))}, not an nn.Linear")
        if why := obstacle(module, owners):
            raise Unlike(f"{self._named(path)}: {why}")

    def _check_function(self, path: str) -> None:
        function = self._attribute(path)
        if not works_on_parts(function):
            shown = getattr(function, "__qualname__", called(type(function)))
            raise Unlike(f"{self._named(path)} is {shown}, which isn't known to work on parts of the features")

    def _layers(self) -> Iterator[_Layer]:
        """What is neither a linear layer nor made of other modules."""
        yield from self._layers_of(self.block, "", {*self._first(), *self._whole(), *self.kind.second})

    def _layers_of(self, module: nn.Module, path: str, named: set[str]) -> Iterator[_Layer]:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                raise Unlike(f"{self._named(_joined(path, name))} is a parameter that isn't a layer's")
        for name, child in module.named_children():
            where = _joined(path, name)
            if where in named:
                continue
            if (known := layer_kind(child)) is not None:
                yield where, child, known
            elif self._is_made_of(child):
                yield from self._layers_of(child, where, named)
            else:
                block = type(self.block).__name__
                raise Unlike(f"{self._named(where)} is a {called(type(child))}, which isn't known in a {block}")

    def _is_made_of(self, module: nn.Module) -> bool:
        kind = type(module)
        own = kind.__module__ == type(self.block).__module__ and any(True for _ in module.children())
        return own or kind in _CONTAINERS or kind in self.kind.made_of


def _spread_part(module: Any, part: Part, setting: StageContext, layout: ParallelStyle) -> None:
    entry = SharedInput(setting, layout.gather) if part.input is not None else None
    ranks = setting.grid.size("yz")
    for path in part.first:
        layer = module.get_submodule(path)
        order = fused_order(features(layer)[0], part.fused, ranks) if part.fused > 1 and ranks > 1 else None
        spread(layer, setting, layout, order=order, entry=entry)
    for path in part.whole:
        norm = module.get_submodule(path)
        norm.shards = {
            name: Shard(tuple(map(Cut, parameter.shape)), "xyz")
            for name, parameter in norm._parameters.items()
            if parameter is not None
        }
    for name in part.local:
        set_attribute(module, name, attribute(module, name) // ranks)
    if entry is not None or part.dropout is not None:
        wrap(module, setting, entry, part.input, part.dropout)


@lru_cache
def fused_order(size: int, fused: int, ranks: int) -> tuple[int, ...]:
    """The out-features of `fused` projections in one, so that each rank's lie side by side: q0 k0 v0 q1 k1 v1."""
    one, part = size // fused, size // fused // ranks
    return tuple(
        projection * one + rank * part + i for rank in range(ranks) for projection in range(fused) for i in range(part)
    )


def _head_size(module: nn.Module, part: Part) -> int:
    assert part.head_size is not None
    size = attribute(module, part.head_size) if isinstance(part.head_size, str) else part.head_size(module)
    return int(size)


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
