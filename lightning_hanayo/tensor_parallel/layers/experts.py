"""Experts over a cube: each rank of a (y, z) plane holds and runs its share of a layer's experts, for all of the plane.

    own tokens [t, h]                            E = 6 experts over 4 ranks: 0 1 | 2 3 | 4 5 | -
      --rows to the ranks of their experts-->    [r, h], with their choices and weights [r, k]
      --own experts, by the layer's own code-->  [r, h], for each row the weighted sum over its experts here
      --rows back, added up-->                   [t, h]

A token goes to a rank once, however many of its experts are there. No token is dropped, so that the result is that of
one process. Ranks first tell each other how many rows will come: the only time that the host waits for the device.

For modules of transformers whose experts are fused, [E, .., ..], and called with tokens, indices and weights: those of
its interface for experts. Whichever implementation its configuration names computes the products.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.made_once import once
from lightning_hanayo.tensor_parallel import collectives
from lightning_hanayo.tensor_parallel.mesh import MeshAxis
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard, shard_module, sharded_class
from lightning_hanayo.tensor_parallel.stage_context import StageContext


def is_fused_experts(module: nn.Module) -> bool:
    """Whether the module is of a class that transformers' `use_experts_implementation` has decorated, and has weights
    of all experts in each of its parameters."""
    number = vars(module).get("num_experts")
    parameters = [one for one in module._parameters.values() if one is not None]
    is_decorated = {"has_gate", "has_bias", "is_transposed"} <= vars(module).keys() and bool(parameters)
    return is_decorated and all(one.shape[:1] == (number,) for one in parameters)


@dataclass(frozen=True)
class DispatchPlan:
    """Where the tokens of one call go."""

    tokens: Tensor
    """[sent rows]: own tokens, by the ranks that get them"""
    sent: list[int]
    """rows for each rank"""
    received: list[int]
    """rows from each rank"""
    rows: Tensor
    """[pairs]: a received row for each of its experts here"""
    slots: Tensor
    """[pairs]: which of the row's k choices that is"""
    experts: Tensor
    """[pairs]: which of this rank's experts"""


@dataclass(eq=False)
class ExpertSharding:
    """How one layer's experts are sharded. All ranks of the mesh call the layer, each with tokens of its own."""

    context: StageContext
    num_experts: int
    """of all ranks"""
    number: int = field(default=0, init=False)
    """of the layer, in the context's `call_order`"""

    def attach(self, module: nn.Module) -> None:
        """Shard the layer's parameters, and make it compute with this. Parameter objects and names stay."""
        mesh = self.context.mesh
        of_experts = DimShard(self.num_experts, "yz", as_one=True)
        shards = {
            name: Shard((of_experts, *map(DimShard, parameter.shape[1:])), "x")
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        self._first, stop = of_experts.span(mesh)
        self._num_own = stop - self._first
        self._of_a_rank = -(-self.num_experts // mesh.size("yz"))
        kind = sharded_class(ShardedExperts, type(module))  # type: ignore[arg-type]
        shard_module(module, kind, shards, mesh, sharding=self)
        self.number = self.context.call_order.add(module, "experts='whole'")

    def forward(
        self, module: "ShardedExperts", run: Callable[..., Tensor], x: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """The weighted sum over each token's experts, [t, h]. `run` is the layer's own code, for experts of this rank.

        Raises:
            UnsupportedError: the layer is called with other shapes than x [t, h], and index and weights [t, k].
        """
        if x.dim() != 2 or index.shape != weights.shape or index.shape[:-1] != x.shape[:1]:
            shapes = ", ".join(str(tuple(one.shape)) for one in (x, index, weights))
            raise UnsupportedError(
                f"experts='cube': {type(module).__name__} is called with tensors of the shapes {shapes}, and not with "
                f"tokens [t, h], and indices and weights of their experts [t, k]. Leave experts='cube' out."
            )
        axis = self.context.mesh.axis("yz")
        self.context.call_order.check(self.number)
        plan = once(lambda: self._plan_dispatch(index, axis))
        rows, choices = _Dispatch.apply(x[plan.tokens], weights[plan.tokens], axis, plan)
        if len(plan.rows):
            module.num_experts = self._num_own
            try:
                of_pairs = run(rows[plan.rows], plan.experts[:, None], choices[plan.rows, plan.slots][:, None])
            finally:
                module.num_experts = self.num_experts
            out = torch.zeros_like(rows).index_put((plan.rows,), of_pairs, accumulate=True)
        else:  # no rows: the parameters get gradients all the same, as in one process
            parameters = [one for one in module._parameters.values() if one is not None]
            out = rows + sum(one[:0].sum().to(rows.dtype) for one in parameters)
        # not index_add, which adds in any order on GPUs
        back = collectives.run(
            out,
            axis,
            lambda out: axis.exchange_rows(out, plan.received, plan.sent),
            lambda gradient: axis.exchange_rows(gradient, plan.sent, plan.received),
        )
        return torch.zeros_like(x).index_put((plan.tokens,), back, accumulate=True)

    @torch.no_grad()
    def _plan_dispatch(self, index: Tensor, axis: MeshAxis) -> DispatchPlan:
        """Called by all ranks of the plane."""
        ranks = index // self._of_a_rank
        chosen = index.new_zeros(axis.size, len(index)).scatter_add_(0, ranks.t(), torch.ones_like(ranks.t()))
        counts = torch.stack([(chosen > 0).sum(1), chosen.sum(1)], 1)  # rows, and pairs, for each rank
        coming = axis.all_to_all(counts).wait()
        sent, received, num_pairs = torch.stack([counts[:, 0], coming[:, 0], coming[:, 1]]).tolist()
        tokens = torch.nonzero_static(chosen, size=sum(sent))[:, 1]
        own = axis.exchange_rows(index[tokens], sent, received).wait() - self._first
        pairs = torch.nonzero_static((own >= 0) & (own < self._num_own), size=sum(num_pairs))
        rows, slots = pairs.unbind(1)
        return DispatchPlan(tokens, sent, received, rows, slots, own[rows, slots])


class ShardedExperts(nn.Module):
    """The base class of all experts over a cube, whichever class they were converted from."""

    sharding: ExpertSharding
    num_experts: int

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Called by all ranks of the mesh, in the same order."""
        with torch._C.DisableTorchFunctionSubclass():  # the parameters are parts here, whatever block code sees
            return self.sharding.forward(self, super().forward, hidden_states, top_k_index, top_k_weights)


class _Dispatch(torch.autograd.Function):
    """Sends rows and their weights; gradients come back. One function, so that all ranks run its backward, also those
    that have no use for weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, axis: MeshAxis, plan: DispatchPlan) -> tuple[Tensor, ...]:
        ctx.axis, ctx.plan = axis, plan
        pending = [axis.exchange_rows(one, plan.sent, plan.received) for one in (x, weights)]
        return tuple(one.wait() for one in pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        axis, sent, received = ctx.axis, ctx.plan.received, ctx.plan.sent
        pending = [
            axis.exchange_rows(one, sent, received) if needed else None
            for one, needed in zip(gradients, ctx.needs_input_grad, strict=False)
        ]
        return *(one and one.wait() for one in pending), None, None
