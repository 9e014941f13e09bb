"""Converts a block whose class isn't registered: each linear layer by itself, and its dropouts' random streams.

The code of the block isn't parallelized: each rank passes its own tokens to a linear layer, and gets them back, whole.

own tokens [m, K]  --all-to-all over z-->  [z, m, K/z]  --product-->  [y, m, N/y]  --all-to-all over y-->  [m, N]

The product all-gathers over y on dim 1 and reduce-scatters over z on dim 0, so that tokens return to the rank they
belong to. With both on one dimension they would return with y and z exchanged. Ranks may have different numbers of
tokens: all pad theirs to the largest. Where tokens are few compared with features, only the weight is communicated:

own tokens [m, K]  --product with the whole W, of which each rank stores [N/(x y z), K]-->  own tokens [m, N]

The code of a generic block gets whole parameters where it computes with those of a 3-D layer itself, as in DoRA and
Mamba: for the time of the block's forward they are gathered `on_use`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
import torch._functorch.vmap
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo import partial_values
from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.linear_modules import as_autocast, is_linear
from lightning_hanayo.tensor_parallel import on_use
from lightning_hanayo.tensor_parallel.collectives import END, all_to_all, padded, split_dim
from lightning_hanayo.tensor_parallel.convert import conversion
from lightning_hanayo.tensor_parallel.layers.experts import ExpertSharding, ShardedExperts, is_fused_experts
from lightning_hanayo.tensor_parallel.layers.linear import LinearSharding, ShardedLinear, features
from lightning_hanayo.tensor_parallel.layers.norm import parallelize_dropout
from lightning_hanayo.tensor_parallel.product import EXCHANGED_TOKENS, NO_COLLECTIVE, ParallelStyle
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard, shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext

Communicated = Literal["activations", "weight"]
"""by ranks to each other: activations, and parts of the weight; or the weight alone"""

Experts = Literal["whole", "cube"]
"""where fused experts of a block are while a batch runs: all on each rank, or shared over the ranks of y and z"""

_OUTCOMES: dict[Communicated, str] = {
    "activations": "3-D, activations exchanged around it",
    "weight": "weight sharded over all ranks, gathered whole",
}
SHARED_EXPERTS = "experts shared over y and z, tokens sent to them"


def plan_generic(
    block: nn.Module,
    number: int,
    owners: conversion.ParameterOwners,
    sizes: MeshSizes,
    tokens: int,
    experts: Experts = "whole",
) -> conversion.BlockPlan:
    """Plan a block on a mesh of these `sizes`. `tokens` estimates how many a micro-batch has.

    No size must divide, since all are padded.
    """
    plan = conversion.BlockPlan(block, number)
    for path, module in block.named_modules():
        reason = None
        if is_linear(module):
            if (reason := conversion.reason_ineligible(module, owners)) is None:
                communicated = cheapest(features(module), tokens, sizes)
                plan.outcomes[path] = _OUTCOMES[communicated]
                plan.products.append(((path,), False))
                plan.steps.append(partial(parallelize_generic_linear, module, communicated=communicated))
        elif experts == "cube" and is_fused_experts(module):
            if (reason := conversion.reason_unshared(module, owners)) is None:
                plan.outcomes[path] = SHARED_EXPERTS
                plan.steps.append(partial(_share_experts, module))
        elif any(parameter is not None for parameter in module._parameters.values()):
            reason = "a subclass" if isinstance(module, nn.Linear) else "no linear layer"
        if reason is not None:
            plan.reasons[path] = reason
    if any(plan.outcomes):  # not where the block is a linear layer itself, whose path is empty
        plan.steps.append(partial(_wrap_forward, block))
    for path, module in block.named_modules():
        if type(module) is nn.Dropout:
            plan.outcomes[path] = "random stream of each rank"
            plan.steps.append(partial(parallelize_dropout, module))
    return plan


def _share_experts(module: Any, context: StageContext) -> None:
    ExpertSharding(context, module.num_experts).attach(module)


def _wrap_forward(block: nn.Module, context: StageContext) -> None:
    """Wrap the forward of this instance: its class, names and repr stay."""
    own = {"_stage_context": context, "_num_layers_so_far": context.call_order.num_layers}
    vars(block).update(own | {_ORIGINAL: vars(block).get("forward"), "forward": MethodType(forward, block)})


class _CalledByUserCode(LinearSharding):
    """A layer in code that knows nothing of the mesh, so that ranks might call other layers than each other."""

    @override
    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        self.number = self.context.call_order.add(module)

    @override
    def parameter(self, module: ShardedLinear, name: str) -> Tensor | None:
        parameter, shard = module._parameters[name], shards_of(module).get(name)
        is_own = parameter is None or isinstance(parameter, partial_values.PartialParameter)
        if is_own or shard is None or not _is_part(module, shard):
            return parameter
        return on_use.alias(parameter, parameter, _source(self, shard))


class _ExchangedActivations(_CalledByUserCode):
    """A layer whose activations are exchanged before and after its product."""

    @override
    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        own = as_autocast(x).flatten(0, -2)
        (y_axis, z_axis), out = (self.context.mesh.axis(name) for name in "yz"), self.matrix.shape[0]
        # Ranks ask each other each time: the numbers may differ for reasons that only the surrounding code knows.
        most = self.context.call_order.check(self.number, own.shape[0])
        columns = all_to_all(split_dim(padded(own, 0, most), z_axis.size, 1), z_axis)
        y = super().forward(columns, None if bias is None else padded(bias, 0, self.gathered_shape[0]))
        tokens = all_to_all(y[0].unflatten(0, (y_axis.size, most)), y_axis).movedim(0, 1).flatten(1)
        return tokens[: own.shape[0], :out].reshape(*x.shape[:-1], out)


class _GatheredWeight(_CalledByUserCode):
    """A layer whose weight is sharded over all ranks by its out-features, and gathered whole for each call."""

    weight_axis = "xyz"

    def __post_init__(self) -> None:
        out, in_ = self.gathered_shape = self.sizes
        self.matrix = Shard((DimShard(out, "xyz", as_one=True), DimShard(in_)))
        self.vector = Shard((DimShard(out),), "xyz")
        self.style = ParallelStyle(NO_COLLECTIVE, NO_COLLECTIVE)

    @override
    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        self.context.call_order.check(self.number)
        y = self.product(x)[1]
        return y if bias is None else y + bias.to(y.dtype)


def parallelize_generic_linear(module: nn.Module, context: StageContext, communicated: Communicated) -> None:
    """Parallelize an `nn.Linear` or a `Conv1D` in place, for code that knows nothing of the mesh.

    All ranks of the mesh call it in the same order, each with tokens of its own, or with none.
    """
    sharding = _ExchangedActivations if communicated == "activations" else _GatheredWeight
    sharding(context, EXCHANGED_TOKENS, features(module)).attach(module)


def cheapest(sizes: tuple[int, int], tokens: int, mesh: MeshSizes) -> Communicated:
    """Returns the cheaper way to communicate, by the elements that each rank receives in a forward and a backward.

    M tokens [M, K] times W [N, K], P = x y z ranks:
    activations    2 [(y-1) M K + (x-1) K N + (z-1) M N + (1 - 1/z) M K + (1 - 1/y) M N] / P
    weight         2 (P-1) K N / P
    """
    (n, k), (x, y, z) = sizes, mesh
    activations = (y - 1 / z) * tokens * k + (x - 1) * k * n + (z - 1 / y) * tokens * n
    return "weight" if (x * y * z - 1) * k * n <= activations else "activations"


_ORIGINAL = "_forward_with_parts"


def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the block's forward. A function of this module, so that pickle finds it by name."""
    original = vars(block)[_ORIGINAL] or MethodType(type(block).forward, block)
    if torch.compiler.is_dynamo_compiling():
        return original(*args, **kwargs)
    with _whole_on_use(block):
        output = original(*args, **kwargs)
    order = block._stage_context.call_order
    if order.num_layers == block._num_layers_so_far:  # the stage's last block: behind others there is a next call
        order.check(END)
    return output


@contextmanager
def _whole_on_use(block: nn.Module) -> Iterator[None]:
    """Give the parameters of which this rank holds a part the class that gathers them.

    Raises:
        UnsupportedError: one was changed in place by way of a view of it.
    """
    changed: list[tuple[nn.Parameter, type[nn.Parameter], on_use.Source]] = []
    for module in [module for module in block.modules() if isinstance(module, ShardedLinear | ShardedExperts)]:
        for name, shard in shards_of(module).items():
            parameter = module._parameters[name]
            if parameter is not None and _is_part(module, shard):
                changed.append((parameter, type(parameter), _source(module.sharding, shard)))
    for parameter, _, source in changed:
        parameter.__class__ = on_use.WholeOnUse
        vars(parameter)["_source"] = source
    try:
        with on_use.whole_arguments():
            yield
    finally:
        for parameter, own_class, _ in changed:
            parameter.__class__ = own_class
            del vars(parameter)["_source"]
    for parameter, _, source in changed:
        source.check(parameter, ", or leave its layer out of the cube with HanayoStrategy(cube_exclude=...)")


def _source(sharding: Any, shard: Shard) -> on_use.Source:
    context = sharding.context
    return on_use.Source(context.mesh, shard, partial(context.call_order.check, sharding.number))


def _is_part(module: ShardedLinear | ShardedExperts, shard: Shard) -> bool:
    return module.sharding.context.mesh.size(shard.axes) > 1
