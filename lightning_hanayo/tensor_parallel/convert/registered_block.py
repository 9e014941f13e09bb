"""Converts a block whose class is registered: checks it against its spec, and parallelizes it with its own code.

The forward of a module that shares an input is wrapped. It runs on whole sequences, on this rank's heads or features:

forward(module, x, ...)    x [batch/x, seq/y, h/z]  --all-gather-->  [batch/x, seq, h/z]  -->  its class's forward

Random numbers that the forward draws itself, as an attention for its dropout, come from this rank's own stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.divisibility import Divisibility
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.linear_modules import as_autocast, is_linear
from lightning_hanayo.tensor_parallel.convert import conversion, layer_specs
from lightning_hanayo.tensor_parallel.convert.block_specs import BlockSpec, ProjectionGroup, joined, set_attribute
from lightning_hanayo.tensor_parallel.layers.linear import SharedInput, features, parallelize_linear
from lightning_hanayo.tensor_parallel.layers.norm import rank_random_stream, replicate_norm
from lightning_hanayo.tensor_parallel.product import SEQUENCE, SEQUENCE_FIRST, ParallelStyle
from lightning_hanayo.tensor_parallel.sharding import fused_order
from lightning_hanayo.tensor_parallel.stage_context import StageContext

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class SpecMismatch(Exception):
    """A block differs from its spec. The message says in which part, and why."""


def is_batch_first(block: nn.Module, spec: BlockSpec) -> bool:
    """Whether the block's residual streams are [batch, seq, h]."""
    return spec.batch_first is None or spec.batch_first(block)


class RegisteredBlock(conversion.BlockPlan):
    """The plan of a block, which messages call `name`, of the class that `spec` describes.

    Raises:
        SpecMismatch: they don't agree in all parts.
    """

    def __init__(
        self, block: nn.Module, number: int, name: str, spec: BlockSpec, owners: conversion.ParameterOwners
    ) -> None:
        super().__init__(block, number)
        self.name, self.spec, self.owners = name, spec, owners
        self._plan_linear_layers(SEQUENCE if is_batch_first(block, spec) else SEQUENCE_FIRST)
        for path, module in block.named_modules():
            hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
            if any(hooks) or conversion.has_instance_forward(module):
                raise SpecMismatch(
                    f"{joined(name, path)} has hooks or a forward of its own, which would see parts of tensors"
                )
        self._plan_other_layers()
        self._check_values()
        self.steps.append(self._override)

    def _plan_linear_layers(self, style: ParallelStyle) -> None:
        for group in self.spec.projections:
            owner = self._attribute(group.path)
            paths = tuple(joined(group.path, path) for path in group.column_parallel)
            for path in paths:
                out, in_ = self._features(path)
                what, size = "features", out // group.num_fused
                if (read := group.head_size) is not None:
                    head_size = self._attribute(joined(group.path, read)) if isinstance(read, str) else read(owner)
                    what, size = "heads", size // int(head_size)
                self._require(path, (what, size, "yz"), ("in-features", in_, "z"))
            norms = [joined(group.path, path) for path in group.replicated_norms]
            self.outcomes |= dict.fromkeys(paths, "3-D, column-parallel") | dict.fromkeys(norms, "replicated")
            self.products += [(paths, False)] if group.input is not None else [((path,), False) for path in paths]
            self.steps.append(partial(parallelize_group, owner, group, style))
        for path in self.spec.row_parallel:
            out, in_ = self._features(path)
            self._require(path, ("out-features", out, "z"), ("in-features", in_, "yz"))
            self.outcomes[path] = "3-D, row-parallel"
            self.products.append(((path,), True))
            self.steps.append(partial(parallelize_linear, self._attribute(path), style=style.row_parallel()))

    def _plan_other_layers(self) -> None:
        for path, module, layer in list(self._layers()):
            if any(self.owners.shared_parameter(part) for part in module.modules()):
                raise SpecMismatch(f"{joined(self.name, path)} shares a parameter with another module")
            try:
                self._require(path, *layer.sizes(module))
            except UnsupportedError as error:
                raise SpecMismatch(f"{joined(self.name, path)}: {error}") from None
            self.steps.append(partial(layer.parallelize, module))
            if layer.parallelize is not layer_specs.elementwise:
                self.outcomes[path] = "3-D"

    def _check_values(self) -> None:
        for path in self.spec.elementwise_functions:
            function, where = self._attribute(path), joined(self.name, path)
            if not layer_specs.is_elementwise_function(function):
                shown = getattr(function, "__qualname__", conversion.short_class_name(type(function)))
                raise SpecMismatch(f"{where} is {shown}, which isn't known to compute each entry by itself")
        for path, expected in self.spec.required_values.items():
            if (got := self._attribute(path)) != expected:
                raise SpecMismatch(f"{joined(self.name, path)} is {got!r}, where {expected!r} is expected")

    def _override(self, _: StageContext) -> None:
        for path, value in self.spec.overrides.items():
            set_attribute(self.block, path, value)

    def _require(self, path: str, *sizes: tuple[str, int, str]) -> None:
        self.required += [Divisibility(joined(self.name, path), *one) for one in sizes]

    def _attribute(self, path: str) -> Any:
        try:
            return attrgetter(path)(self.block) if path else self.block
        except AttributeError:
            raise SpecMismatch(f"{self.name} has no {path}") from None

    def _features(self, path: str) -> tuple[int, int]:
        """The out- and in-features of a linear layer that can be sharded."""
        if not is_linear(module := self._attribute(path)):
            shown = conversion.short_class_name(type(module))
            raise SpecMismatch(f"{joined(self.name, path)} is a {shown}, not an nn.Linear")
        if reason := conversion.reason_ineligible(module, self.owners):
            raise SpecMismatch(f"{joined(self.name, path)}: {reason}")
        return features(module)

    def _layers(self, path: str = "") -> Iterator[tuple[str, nn.Module, layer_specs.LayerSpec]]:
        """Yields the layers without an outcome yet that aren't made of other modules, with their paths in the block."""
        module = self.block.get_submodule(path)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                raise SpecMismatch(f"{joined(self.name, path, name)} is a parameter that isn't a layer's")
        for name, child in module.named_children():
            child_path, kind = joined(path, name), type(child)
            if child_path in self.outcomes:
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
                raise SpecMismatch(f"{joined(self.name, child_path)} is a {shown}, which isn't a registered layer")


def parallelize_group(module: Any, group: ProjectionGroup, style: ParallelStyle, context: StageContext) -> None:
    """Parallelize the projections of a module in place, and wrap its forward if that gathers their input, or draws."""
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
        names = list(signature(type(module).forward).parameters)[1:]
        index = names.index(group.input) if group.input else 0
        wrapper = GatheredForward(context, shared_input, group.input or "", index, group.dropout)
        vars(module).update(_gathered_forward=wrapper, forward=MethodType(forward, module))  # class, names, repr stay


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


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the module's forward. A function of this module, so that pickle finds it by name."""
    wrapper: Any = module._gathered_forward
    drops = wrapper.dropout is not None and module.training and bool(attrgetter(wrapper.dropout)(module))
    return (_run_with_dropout if drops else _run)(module, *args, **kwargs)


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    wrapper: Any = module._gathered_forward
    if wrapper.shared_input is None:
        return type(module).forward(module, *args, **kwargs)
    given: Any = list(args)
    at, key = (kwargs, wrapper.input) if wrapper.input in kwargs else (given, wrapper.index)
    at[key] = wrapper.shared_input.all_gather(as_autocast(at[key]))  # cast once, not by each linear layer that reads it
    try:
        return type(module).forward(module, *given, **kwargs)
    finally:
        wrapper.shared_input.clear()


@torch.compiler.disable
def _run_with_dropout(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Draws from this rank's own stream. A compiled graph has one stream for all."""
    wrapper: Any = module._gathered_forward
    device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    with rank_random_stream(wrapper.context, device):
        return _run(module, *args, **kwargs)
