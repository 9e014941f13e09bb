"""Code around the stack, and the blocks of a cube, run uncompiled during a run; a warning names what was compiled."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.stack import find_stack
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.strategy.setup.checks import check_cuda_graphs, run_uncompiled
from tests.harness import models


class Model(models.MLP):
    """Its blocks are compiled, by a compiler that counts.

    The compiler is a function: a method would be copied with its model each time that Dynamo compiles, which takes more
    than a minute in a process with as many objects as that of the whole suite.
    """

    def __init__(self) -> None:
        super().__init__()
        graphs: list[torch.fx.GraphModule] = []
        self.graphs = graphs

        def count(graph: torch.fx.GraphModule, _: object) -> object:
            graphs.append(graph)
            return graph.forward

        self.count = count
        for i, block in enumerate(self.blocks):
            self.blocks[i] = self.compiled(block)

    def compiled(self, block: nn.Module) -> nn.Module:
        return torch.compile(block, backend=self.count)  # type: ignore[return-value]


class CompiledInPlace(Model):
    def compiled(self, block: nn.Module) -> nn.Module:
        block.compile(backend=self.count)
        return block


def graphs_of(model: Model, is_registered: bool | None = None) -> int:
    """How many graphs are compiled in a forward during a run."""
    torch.compiler.reset()
    attributes, stack = TemporaryAttributes(), find_stack(model)
    run_uncompiled(model, stack if is_registered is None else stack.uncompiled, attributes, is_registered=is_registered)
    with torch.no_grad():
        model(torch.ones(1, models.WIDTH))
    attributes.restore()
    return len(model.graphs)


@pytest.mark.parametrize("factory", [Model, CompiledInPlace])
def test_blocks_of_a_pipeline_stay_compiled(factory: type[Model]) -> None:
    assert graphs_of(factory()) > 0


@pytest.mark.parametrize("factory", [Model, CompiledInPlace])
def test_generic_blocks_of_a_cube_are_not_compiled(factory: type[Model]) -> None:
    model = factory()
    with pytest.warns(
        UserWarning,
        match="^blocks.0, blocks.1, .*: compiled, but run as written, because of the stack 'blocks': layers",
    ):
        assert graphs_of(model, is_registered=False) == 0
    model.blocks[0](torch.ones(1, models.WIDTH))
    assert len(model.graphs) == 1  # after the run it is compiled again


def test_registered_blocks_of_a_cube_stay_compiled_in_place() -> None:
    assert graphs_of(CompiledInPlace(), is_registered=True) > 0
    with pytest.warns(UserWarning, match="^blocks.0, .*: compiled, but run as written, .* with block.compile()"):
        assert graphs_of(Model(), is_registered=True) == 0


class Around(Model):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend=self.count)

    def compiled(self, block: nn.Module) -> nn.Module:
        return block

    @torch.compile(backend="eager")
    def training_step(self, batch: models.Batch, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


def test_what_is_around_the_stack_is_not_compiled() -> None:
    with pytest.warns(UserWarning, match="^training_step, Around: compiled, but run as written.* the stack 'blocks'"):
        assert graphs_of(Around()) == 0


def test_nothing_is_said_where_nothing_is_compiled() -> None:
    model = models.MLP()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_uncompiled(model, find_stack(model), TemporaryAttributes(), is_registered=False)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of inductor's imports
@pytest.mark.parametrize("how", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}], ids=str)
def test_cuda_graphs_are_refused(how: dict[str, Any]) -> None:
    in_place, wrapped, by_hand, outside = (models.MLP() for _ in range(4))
    in_place.blocks[3].compile(**how)
    wrapped.blocks[3] = torch.compile(wrapped.blocks[3], **how)
    inner = by_hand.blocks[3].up
    inner.forward = torch.compile(inner.forward, **how)
    outside.head.compile(**how)
    for model, name in ((in_place, "blocks.3"), (wrapped, "blocks.3"), (by_hand, "blocks.3.up"), (outside, "head")):
        with pytest.raises(UnsupportedError, match=rf"^{name} is compiled with CUDA graphs.*'max-autotune-no-cudag"):
            check_cuda_graphs(model, find_stack(model, "blocks"))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_other_modes_and_what_runs_uncompiled_are_accepted() -> None:
    model = models.MLP()
    model.blocks[0].compile(mode="max-autotune-no-cudagraphs")
    model.head.compile(backend="aot_eager")
    model.compile(mode="reduce-overhead")
    check_cuda_graphs(model, find_stack(model))
