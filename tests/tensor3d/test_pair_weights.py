"""Two forwards, or two backwards, of one stage at once: each weight is gathered once, and results stay the same."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.overlap.link_queue import LinkQueue
from lightning_hanayo.overlap.turns import DeviceTurns
from lightning_hanayo.pipeline_parallel.object_collectives import broadcast_object
from lightning_hanayo.pipeline_parallel.pairs import RECORDED, Pairs, kinds_of
from lightning_hanayo.schedule import Action, Kind
from lightning_hanayo.tensor_parallel.layers.linear import Linear3D
from lightning_hanayo.tensor_parallel.mesh import Mesh, Pending
from lightning_hanayo.tensor_parallel.product import SEQUENCE
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from lightning_hanayo.tensor_parallel.weights import PairWeights
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool

ROWS, LENGTH, IN, OUT = 4, 4, 12, 24
BATCHES = RECORDED + 2
"""by turns, recorded, and two by the plan"""
Run = Callable[[], Tensor | None]


class Stage:
    """Two layers with a pair of micro-batches."""

    def __init__(self, mesh: Mesh, queue: LinkQueue) -> None:
        torch.manual_seed(0)
        self.context = StageContext(mesh, "shards", turns=queue.turns)
        up = Linear3D(IN, OUT, context=self.context)
        down = Linear3D(OUT, IN, context=self.context, style=SEQUENCE.row_parallel())
        self.layers = [up.double(), down.double()]
        x = part(torch.randn(ROWS, LENGTH, IN, dtype=torch.float64), mesh, "x", "y", "z")
        self.inputs = [(m * x).requires_grad_() for m in (1, 2)]
        self.outputs: dict[int, Tensor] = {}

    def forward(self, m: int) -> Tensor:
        self.context.before_forward(LENGTH)
        self.outputs[m] = self.layers[1](torch.tanh(self.layers[0](self.inputs[m])))
        return self.outputs[m].detach()

    def backward(self, m: int) -> None:
        self.context.before_backward(LENGTH)
        self.outputs.pop(m).square().sum().backward()

    def run(self, run: Callable[[Action, Run, Action, Run], Any]) -> list[Tensor]:
        """Both forwards, then both backwards. Returns outputs and gradients."""
        parameters = [parameter for layer in self.layers for parameter in layer.parameters()]
        for parameter in (*parameters, *self.inputs):
            parameter.grad = None
        self.context.begin_batch()
        made = []
        for kind, call in ((Kind.F, self.forward), (Kind.B, self.backward)):
            made += run(Action(0, kind, 0), partial(call, 0), Action(0, kind, 1), partial(call, 1))
        self.context.finish_gradients()
        self.context.end_batch()
        gradients = [one.grad for one in (*self.inputs, *parameters)]
        assert all(one is not None for one in gradients)
        return [one for one in (*made, *gradients) if one is not None]


def one_by_one(first: Action, run_first: Run, second: Action, run_second: Run) -> list[Tensor | None]:
    return [run_first(), run_second()]


def check(sizes: Sizes) -> None:
    with process_group():
        queue = LinkQueue()
        mesh = make_mesh(sizes, queue)
        stage = Stage(mesh, queue)
        CountingAxis.received.clear()
        expected = stage.run(one_by_one)
        alone = CountingAxis.received.copy()
        pairs = Pairs(queue, [], broadcast_object, is_first=torch.distributed.get_rank() == 0)
        actions = [(Action(0, kind, 0), Action(0, kind, 1)) for kind in (Kind.F, Kind.B)]
        for _ in range(BATCHES):
            CountingAxis.received.clear()
            pairs.begin_batch(1, actions)
            found = stage.run(pairs.run)
            for one, other in zip(found, expected, strict=True):
                assert error(one, other) < 1e-12
            x, y, z = sizes
            of_weights = 8 * 2 * (x - 1) * IN * OUT // (x * y * z)  # of both layers
            assert alone["gather"] - CountingAxis.received["gather"] == 2 * of_weights  # forwards and backwards
            assert alone["scatter"] == CountingAxis.received["scatter"]
        (plans,) = pairs.plans.values()
        assert set(plans) == {kinds_of(*both) for both in actions}
        if torch.distributed.get_rank() == 0:
            for both in plans:
                shared = [any(one.is_shared for one in pairs.segments[kind]) for kind in both]
                assert shared == [False, True], "the second action waits for what the first one gathers"
        pairs.close()


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 1)])
def test_a_pair_gathers_each_weight_once(pool: Pool, sizes: Sizes) -> None:
    pool.run(sizes[0] * sizes[1] * sizes[2], check, sizes)


def gathers(made: list[str], name: str) -> Callable[[], Pending[list[Tensor]]]:
    def start() -> Pending[list[Tensor]]:
        made.append(name)
        return Pending.done([torch.tensor(len(made))])

    return start


@pytest.fixture
def turns() -> Iterator[DeviceTurns]:
    made = DeviceTurns()
    yield made
    made.close()


@pytest.mark.parametrize("by_turns", [True, False])
def test_the_second_action_waits_until_the_first_one_gathers(turns: DeviceTurns, by_turns: bool) -> None:
    made: list[str] = []
    weights, event = PairWeights(turns), threading.Event()

    def first() -> float:
        turns.wait(lambda: False, event.wait if not by_turns else lambda: None)
        return float(weights.gather("a", gathers(made, "first")).wait()[0])

    def second() -> float:
        pending = weights.gather("a", gathers(made, "second"))
        event.set()
        return float(pending.wait()[0])

    assert turns.run(first, second, by_turns=by_turns, are_twins=True) == (1.0, 1.0)
    assert made == ["first"]


@pytest.mark.parametrize("by_turns", [True, False])
def test_what_the_first_action_does_not_gather_the_second_one_gathers(turns: DeviceTurns, by_turns: bool) -> None:
    made: list[str] = []
    weights = PairWeights(turns)
    turns.run(
        lambda: None, lambda: weights.gather("a", gathers(made, "second")).wait(), by_turns=by_turns, are_twins=True
    )
    assert made == ["second"]


@pytest.mark.parametrize("by_turns", [True, False])
def test_an_error_of_the_first_action_ends_the_wait(turns: DeviceTurns, by_turns: bool) -> None:
    weights = PairWeights(turns)

    def fail() -> None:
        turns.wait(lambda: False, lambda: None)
        raise HanayoError("its own error")

    with pytest.raises(HanayoError, match="its own error"):
        turns.run(fail, lambda: weights.gather("a", gathers([], "b")).wait(), by_turns=by_turns, are_twins=True)


def test_other_pairs_gather_for_themselves(turns: DeviceTurns) -> None:
    made: list[str] = []
    weights = PairWeights(turns)
    turns.run(*(lambda name=name: weights.gather("a", gathers(made, name)).wait() for name in "bc"))
    weights.gather("a", gathers(made, "d")).wait()
    assert made == ["b", "c", "d"]
