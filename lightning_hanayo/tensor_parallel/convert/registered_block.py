"""Converts a block whose class is registered: checks it against its spec, and parallelizes it with its own code.

The forward of a module that shares an input is wrapped. It runs on whole sequences, on this rank's heads or features:

forward(module, x, ...)    x [batch/x, seq/y, h/z]  --all-gather-->  [batch/x, seq, h/z]  -->  its class's forward

Random numbers that the forward draws itself, as an attention for its dropout, come from this rank's own stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.divisibility import Divisibility
from lightning_hanayo.linear_modules import as_autocast, is_linear
from lightning_hanayo.tensor_parallel.convert import conversion, layer_specs
from lightning_hanayo.tensor_parallel.convert.specs import BlockSpec, ProjectionGroup, joined, set_attribute
from lightning_hanayo.tensor_parallel.layers.linear import SharedInput, features, parallelize_linear
from lightning_hanayo.tensor_parallel.layers.norm import rank_random_stream, replicate_norm
from lightning_hanayo.tensor_parallel.product import SEQUENCE, SEQUENCE_FIRST, ParallelStyle
from lightning_hanayo.tensor_parallel.sharding import fused_order
from lightning_hanayo.tensor_parallel.stage_context import StageContext

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

_Layer = tuple[str, nn.Module, layer_specs.LayerSpec]
"""a layer with its path in the block"""


class SpecMismatch(Exception):
    """A block differs from its spec. The message says in which part, and why."""


class RegisteredBlock:
    """Block `number` of a stack, of the class that `spec` describes. Messages call it `name`."""

    def __init__(self, block: nn.Module, spec: BlockSpec, number: int, name: str) -> None:
        self.block = block
        self.spec = spec
        self.number = number
        self.name = name

    @property
    def batch_first(self) -> bool:
        """Whether the residual streams are [batch, seq, h]."""
        return self.spec.batch_first is None or self.spec.batch_first(self.block)

    def check(self, owners: conversion.ParameterOwners) -> None:
        """Check that the block agrees with its spec in all parts.

        Raises:
            SpecMismatch: it isn't.
        """
        for path in (*self._column_parallel(), *self.spec.row_parallel):
            module = self._attribute(path)
            if not is_linear(module):
                raise SpecMismatch(
                    f"{self._named(path)} is a {conversion.short_class_name(type(module))}, not an nn.Linear"
                )
            if reason := conversion.reason_ineligible(module, owners):
                raise SpecMismatch(f"{self._named(path)}: {reason}")
        for path, module in self.block.named_modules():
            if conversion.has_module_hooks(module) or conversion.has_instance_forward(module):
                raise SpecMismatch(
                    f"{self._named(path)} has hooks or a forward of its own, which would see parts of tensors"
                )
        for path, module, spec in self._layers():
            if any(owners.shared_parameter(part) for part in module.modules()):
                raise SpecMismatch(f"{self._named(path)} shares a parameter with another module")
            if reason := spec.reason_ineligible(module):
                raise SpecMismatch(f"{self._named(path)}: {reason}")
        for path in self.spec.elementwise_functions:
            function = self._attribute(path)
            if not layer_specs.is_elementwise_function(function):
                shown = getattr(function, "__qualname__", conversion.short_class_name(type(function)))
                raise SpecMismatch(f"{self._named(path)} is {shown}, which isn't known to compute each entry by itself")
        for path, expected in self.spec.required_values.items():
            if (got := self._attribute(path)) != expected:
                raise SpecMismatch(f"{self._named(path)} is {got!r}, where {expected!r} is expected")

    def divisibility(self) -> Iterator[Divisibility]:
        """Yields the sizes that must divide over the mesh."""
        for group in self.spec.projections:
            owner = self.block.get_submodule(group.path)
            for path in group.column_parallel:
                layer = joined(group.path, path)
                out, in_ = features(self.block.get_submodule(layer))
                what, size = "features", out // group.num_fused
                if group.head_size is not None:
                    read: Any = group.head_size
                    head_size = attrgetter(read)(owner) if isinstance(read, str) else read(owner)
                    what, size = "heads", size // int(head_size)
                yield Divisibility(self._named(layer), what, size, "yz")
                yield Divisibility(self._named(layer), "in-features", in_, "z")
        for path in self.spec.row_parallel:
            out, in_ = features(self.block.get_submodule(path))
            yield Divisibility(self._named(path), "out-features", out, "z")
            yield Divisibility(self._named(path), "in-features", in_, "yz")
        for path, module, spec in self._layers():
            for what, size, axes in spec.sizes(module):
                yield Divisibility(self._named(path), what, size, axes)

    def products(self) -> Iterator[tuple[tuple[str, ...], bool]]:
        """Yields the linear layers that are one product each, by their paths in the block, and whether row-parallel."""
        for group in self.spec.projections:
            paths = tuple(joined(group.path, path) for path in group.column_parallel)
            yield from [(paths, False)] if group.input is not None else [((path,), False) for path in paths]
        yield from (((path,), True) for path in self.spec.row_parallel)

    def report_rows(self) -> Iterator[conversion.ReportRow]:
        """The outcome of each layer, in the block's order."""
        outcomes = dict.fromkeys(self._column_parallel(), "3-D, column-parallel")
        outcomes |= dict.fromkeys(self.spec.row_parallel, "3-D, row-parallel")
        outcomes |= dict.fromkeys(self._replicated_norms(), "replicated")
        outcomes |= {path: "3-D" for path, _, spec in self._layers() if spec.parallelize is not layer_specs.elementwise}
        for path, module in self.block.named_modules():
            if path in outcomes:
                yield conversion.ReportRow(self.number, path, conversion.describe(module), outcomes[path])

    def install(self, context: StageContext) -> None:
        """Parallelize it in place."""
        style = SEQUENCE if self.batch_first else SEQUENCE_FIRST
        layers = list(self._layers())
        for group in self.spec.projections:
            _parallelize_group(self.block.get_submodule(group.path), group, context, style)
        for path in self.spec.row_parallel:
            parallelize_linear(self.block.get_submodule(path), context, style.row_parallel())
        for _, module, spec in layers:
            spec.parallelize(module, context)
        for path, value in self.spec.overrides.items():
            set_attribute(self.block, path, value)

    def _column_parallel(self) -> list[str]:
        return [joined(group.path, path) for group in self.spec.projections for path in group.column_parallel]

    def _replicated_norms(self) -> list[str]:
        return [joined(group.path, path) for group in self.spec.projections for path in group.replicated_norms]

    def _named(self, path: str) -> str:
        return joined(self.name, path)

    def _attribute(self, path: str) -> Any:
        try:
            return attrgetter(path)(self.block)
        except AttributeError:
            raise SpecMismatch(f"{self.name} has no {path}") from None

    def _layers(self, path: str = "") -> Iterator[_Layer]:
        """Yields the layers that are neither linear ones of the spec nor made of other modules."""
        in_spec = {*self._column_parallel(), *self._replicated_norms(), *self.spec.row_parallel}
        module = self.block.get_submodule(path)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                raise SpecMismatch(f"{self._named(joined(path, name))} is a parameter that isn't a layer's")
        for name, child in module.named_children():
            child_path, kind = joined(path, name), type(child)
            if child_path in in_spec:
                continue
            if (spec := layer_specs.layer_spec(child)) is not None:
                yield child_path, child, spec
            elif (
                kind in (*_CONTAINERS, *self.spec.containers)
                or kind.__module__ == type(self.block).__module__
                and any(True for _ in child.children())
            ):
                yield from self._layers(child_path)
            else:
                shown = conversion.short_class_name(kind)
                raise SpecMismatch(f"{self._named(child_path)} is a {shown}, which isn't a registered layer")


def _parallelize_group(module: Any, group: ProjectionGroup, context: StageContext, style: ParallelStyle) -> None:
    shared_input = SharedInput(context, style) if group.input is not None else None
    ranks = context.mesh.size("yz")
    for path in group.column_parallel:
        layer = module.get_submodule(path)
        sizes = (features(layer)[0] // group.num_fused,) * group.num_fused
        order = fused_order(sizes, ranks) if group.num_fused > 1 and ranks > 1 else None
        parallelize_linear(layer, context, style, order=order, shared_input=shared_input)
    for path in group.replicated_norms:
        replicate_norm(module.get_submodule(path), context)
    for name in group.sharded_counts:
        set_attribute(module, name, attrgetter(name)(module) // ranks)
    if shared_input is not None or group.dropout is not None:
        wrap_forward(module, context, shared_input, group.input, group.dropout)


@dataclass(frozen=True)
class GatheredForward:
    """The wrapper of a module's own forward.

    `shared_input` gathers the argument `input`, which may be given at position `index`, and multiplies it. None: linear
    layers gather it.
    `dropout` is the attribute with the forward's own dropout probability. None: it drops nothing itself.
    """

    context: StageContext
    shared_input: SharedInput | None
    input: str
    index: int
    dropout: str | None


def wrap_forward(
    module: nn.Module, context: StageContext, shared_input: SharedInput | None, input: str | None, dropout: str | None
) -> None:
    """Wrap the forward of this instance. Its class, names and repr stay."""
    names = list(signature(type(module).forward).parameters)[1:]
    wrapper = GatheredForward(context, shared_input, input or "", names.index(input) if input else 0, dropout)
    object.__setattr__(module, "_gathered_forward", wrapper)
    module.forward = MethodType(forward, module)


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the module's forward. A function of this module, so that pickle finds it by name."""
    wrapper: Any = module._gathered_forward
    drops = wrapper.dropout is not None and module.training and bool(attrgetter(wrapper.dropout)(module))
    return (_run_with_dropout if drops else _run)(module, *args, **kwargs)


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    wrapper: Any = module._gathered_forward
    if wrapper.shared_input is None:
        return type(module).forward(module, *args, **kwargs)
    x = kwargs[wrapper.input] if wrapper.input in kwargs else args[wrapper.index]
    gathered = wrapper.shared_input.all_gather(as_autocast(x))  # cast once, not by each linear layer that reads it
    if wrapper.input in kwargs:
        kwargs |= {wrapper.input: gathered}
    else:
        args = (*args[: wrapper.index], gathered, *args[wrapper.index + 1 :])
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        wrapper.shared_input.clear()


@torch.compiler.disable
def _run_with_dropout(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Draws from this rank's own stream. A compiled graph has one stream for all."""
    wrapper: Any = module._gathered_forward
    device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    with rank_random_stream(wrapper.context, device):
        return _run(module, *args, **kwargs)
