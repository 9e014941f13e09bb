"""Registered blocks in a cube compile as one graph, and compute what they compute without a compiler.

block.compile(fullgraph=True)      one graph: no code of a layer breaks it
                                   the same outputs and gradients, weights gathered ahead, gradients left to the queue
"""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.tensor_parallel.convert.block_specs import BlockSpec, ProjectionGroup, register_block
from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import Keep
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.equivalence.test_compiled import needs_compiler, prepare_inductor
from tests.harness.fake_groups import fake_world
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool

LENGTH, WIDTH = 8, 16


class Gated(nn.Module):
    """A gated MLP, whose gate and up are one product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 16, False), nn.Linear(16, WIDTH)
        self.act = nn.SiLU()
        self.skips_up = False

    def forward(self, x: Tensor) -> Tensor:
        if self.skips_up:
            return self.down(self.act(self.gate(x))[..., :16])  # type: ignore[no-any-return]
        y: Tensor = self.down(self.act(self.gate(x))[..., : self.up(x).shape[-1]] * self.up(x))
        return y


class GatedBlock(nn.Module):
    """RMSNorm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH, eps=1e-6), Gated()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


register_block(
    GatedBlock,
    BlockSpec(
        streams=("x",), projections=(ProjectionGroup("mlp", ("gate", "up"), input="x"),), row_parallel=("mlp.down",)
    ),
)
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "gated": GatedBlock,
    "torch": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True, norm_first=True),
    "torch, sequence first": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0),
}


class Stage:
    """Two equal blocks over a mesh, as written or compiled."""

    def __init__(
        self, ranks: Mesh, kind: str, keep: Keep, backend: str | None, queue: WeightGradientQueue | None
    ) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([BLOCKS[kind]().double() for _ in range(2)])
        self.context = StageContext(ranks, keep, queue)
        self.queue = queue
        plan = plan_parallelize(list(self.blocks), "blocks", ranks.sizes)
        assert plan.is_registered
        plan.install(list(self.blocks), self.context)
        if backend is not None:
            for block in self.blocks:
                block.compile(backend=backend, fullgraph=True)
        self.axes = ("x", "y", "z") if plan.batch_dim == 0 else ("y", "x", "z")

    def run(self, length: int, steps: int = 2) -> dict[str, Tensor]:
        """Output, bytes and gradients of steps; the second one finds the order of its weights known."""
        self.context.begin_batch()
        torch.manual_seed(1)
        ranks = self.context.mesh.size("y")
        padded = -(-length // ranks) * ranks
        shape = (4, padded, WIDTH) if self.axes[0] == "x" else (padded, 4, WIDTH)
        whole, gradient = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
        x, dy = (part(one, self.context.mesh, *self.axes).requires_grad_() for one in (whole, gradient))
        CountingAxis.received.clear()
        for _ in range(steps):
            self.context.before_forward(length)
            y = x
            for block in self.blocks:
                y = block(y)
            self.context.before_backward(length)
            self._backward(y, dy.detach())
        found = {"y": y.detach(), "dx": x.grad, "bytes": torch.tensor(float(CountingAxis.received.total()))}
        found |= {name: parameter.grad for name, parameter in self.blocks.named_parameters()}
        self.blocks.zero_grad()
        return found  # type: ignore[return-value]

    def _backward(self, y: Tensor, dy: Tensor) -> None:
        if self.queue is None:
            y.backward(dy)
            return
        self.blocks.zero_grad()
        with self.queue.collecting(0):
            y.backward(dy)
        assert all(parameter.grad is None for parameter in self.blocks.parameters() if parameter.dim() > 1)
        self.queue.drain(0)


def compare(meshes: list[Sizes], backend: str, kinds: list[str]) -> dict[str, float]:
    """Errors of compiled blocks."""
    prepare_inductor()
    errors = {}
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            for kind in kinds:
                cases: list[tuple[Keep, bool]] = [("gathered", False), ("shards", True)]
                torch.compiler.reset()
                for keep, splits in cases:
                    queues = [WeightGradientQueue() if splits else None for _ in range(2)]
                    plain, compiled = (
                        Stage(ranks, kind, keep, which, queue)
                        for which, queue in zip((None, backend), queues, strict=True)
                    )
                    for length in (LENGTH, LENGTH + 1):  # torch compiles once more, for any length
                        expected, got = plain.run(length), compiled.run(length)
                        errors |= {f"{sizes} {kind} {keep} {length} {k}": error(got[k], expected[k]) for k in expected}
    return errors


FIRST: list[tuple[list[Sizes], str]] = [([(2, 1, 1)], "gated")]
CASES: list[tuple[list[Sizes], str]] = [
    *FIRST,
    *(([(1, 2, 2), (2, 1, 2), (4, 1, 1), (1, 4, 1)], kind) for kind in BLOCKS),
    *(([(2, 2, 2)], kind) for kind in BLOCKS),
]


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("meshes", "kind"), CASES, ids=str)
def test_equal_those_as_written(pool: Pool, meshes: list[Sizes], kind: str) -> None:
    for errors in pool.run(prod(meshes[0]), compare, meshes, "aot_eager", [kind]):
        assert {what: value for what, value in errors.items() if not value <= 1e-10} == {}


@pytest.mark.thorough
@pytest.mark.timeout(400)
@needs_compiler
def test_equal_those_as_written_by_inductor(pool: Pool) -> None:
    for errors in pool.run(4, compare, [(1, 2, 2)], "inductor", ["gated", "torch"]):
        assert {what: value for what, value in errors.items() if not value <= 1e-10} == {}


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=(pytest.mark.thorough, needs_compiler))]
)
def test_a_layer_that_is_not_called_gets_no_gradient(pool: Pool, backend: str) -> None:
    assert pool.run(1, without_gradient, backend) == [["mlp.up.weight"]]


def without_gradient(backend: str) -> list[str]:
    prepare_inductor()
    torch.compiler.reset()
    context, block = StageContext(Mesh.single()), GatedBlock()
    block.mlp.skips_up = True
    plan_parallelize([block], "blocks", (1, 1, 1)).install([block], context)
    block.compile(backend=backend, fullgraph=True)
    context.before_forward(LENGTH)
    y = block(torch.randn(2, LENGTH, WIDTH))
    context.before_backward(LENGTH)
    y.sum().backward()
    return [name for name, parameter in block.named_parameters() if parameter.grad is None]


def test_lengths_that_y_divides_share_one_graph() -> None:
    """More of them than torch recompiles for: the second one makes the graph for any length."""
    torch.compiler.reset()
    with fake_world(0, 2):
        context, block = StageContext(Mesh.create((1, 2, 1))), GatedBlock()
        plan_parallelize([block], "blocks", (1, 2, 1)).install([block], context)
        block.compile(backend="eager", fullgraph=True)
        for length in range(8, 30, 2):
            context.before_forward(length)
            block(torch.randn(2, length // 2, WIDTH))


def test_equal_blocks_share_one_graph_and_a_closed_context_refuses() -> None:
    """A layer's number is no constant of the graph."""
    context = StageContext(Mesh.single())
    blocks = [GatedBlock() for _ in range(10)]  # more than torch recompiles for
    plan_parallelize(blocks, "blocks", (1, 1, 1)).install(blocks, context)
    torch.compiler.reset()
    graphs: list[Any] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    call = torch.compile(lambda block, x: block(x), backend=count, fullgraph=True)
    x = torch.randn(2, LENGTH, WIDTH)
    for block in blocks:
        assert error(call(block, x), block(x).detach()) < 1e-6
    assert len(graphs) == 1
    context.closed = "the run has ended"
    with pytest.raises(UnsupportedError, match="the run has ended"):
        call(blocks[0], x)
