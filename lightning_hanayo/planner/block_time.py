"""The time of one block on one rank of a cube: its products and its collectives on a link that carries one at a time.

W0  X0 |-- product 0 --| Y0 |    attention    | X1 |-- product 1 --| Y1      X: gathered, Y: summed: between products
       |-- W1 --|                              |-- W2 --|                    W: gathered ahead, while others compute

The order is that of `tensor_parallel/product.py`; a test holds it against what the layers really start and wait for.
"""

from collections import deque
from dataclasses import dataclass, replace
from math import prod
from operator import add
from typing import NamedTuple

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.planner.communication_volume import CubeWeights, Experts
from lightning_hanayo.planner.machine import Machine
from lightning_hanayo.planner.model_facts import BlockFacts

MAX_AT_ONCE = 2
"""weights that are gathered ahead, and gradients of weights that are summed while a backward goes on"""
_BACKWARD_CALLS = 2.1
"""operations of a backward for each of its forward: Llama blocks have 82 for 38, 87 for 40 (docs/benchmarks/h100.md)"""
_PAIR_OVERHEAD = 1.03
"""measured time of a pair over its simulated one (docs/benchmarks/pairs.md)"""
_NOT_HIDDEN = 0.2
"""part of the shorter of compute and communication that a pair doesn't hide; simulated ones: 0 to 0.58, mean 0.18"""


class Clock:
    """One rank's time: it computes and waits, while its link carries one collective after the other."""

    def __init__(self) -> None:
        self.now = self.computing = self.receiving = self._free = 0.0
        self._sums: deque[float] = deque()
        """the ends of sums of weights' gradients that are under way"""

    def compute(self, seconds: float) -> None:
        """Compute for so long."""
        self.now += seconds
        self.computing += seconds

    def start(self, seconds: float) -> float:
        """Start a collective that takes the link so long, and return when it ends."""
        if not seconds:
            return self.now
        self.receiving += seconds
        self._free = max(self.now, self._free) + seconds
        return self._free

    def wait(self, end: float) -> None:
        """Wait until then."""
        self.now = max(self.now, end)

    def sum_later(self, seconds: float) -> None:
        """Start a sum of a weight's gradients, after an earlier one has ended if too many are under way."""
        self._sums.append(self.start(seconds))
        if len(self._sums) > MAX_AT_ONCE:
            self.wait(self._sums.popleft())

    def finish(self) -> None:
        """Wait for all sums."""
        self.wait(max(self._sums, default=0.0))


class PartTimes(NamedTuple):
    """Seconds of the parts of a micro-batch's work on one stage. `backward` is the backward in one piece."""

    forward: float = 0.0
    backward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def __add__(self, other: "PartTimes") -> "PartTimes":  # type: ignore[override]  # of vectors, not of tuples
        return PartTimes(*map(add, self, other))

    def __mul__(self, factor: float) -> "PartTimes":  # type: ignore[override]
        forward, backward, of_input, of_weight = self
        return PartTimes(forward * factor, backward * factor, of_input * factor, of_weight * factor)

    def total(self, *, split: bool) -> float:
        """Forward and backward; `split`: the backward in two parts."""
        return self.forward + (self.backward_input + self.backward_weight if split else self.backward)


class BlockTime(NamedTuple):
    """Seconds of one block and one micro-batch: in a stage of its own, and each further one in a stage, whose weights
    are gathered while the one before is computed."""

    alone: PartTimes
    further: PartTimes
    computing: PartTimes = PartTimes()
    """of the device or the host, whichever needs longer"""
    receiving: PartTimes = PartTimes()
    """of the link"""

    def __add__(self, other: "BlockTime") -> "BlockTime":  # type: ignore[override]
        return BlockTime(*map(add, self, other))

    def __mul__(self, factor: float) -> "BlockTime":  # type: ignore[override]
        return BlockTime(*(one * factor for one in self))

    def stage(self, num_blocks: float) -> PartTimes:
        """Of a stage with so many blocks."""
        return self.alone + self.further * (num_blocks - 1)

    def saved_by_a_pair(self, num_blocks: float, *, split: bool) -> float:
        """Seconds that a stage saves if it runs a forward and a backward at once: one computes while the other one
        communicates."""

        def both(times: PartTimes) -> float:
            return times.forward + (times.backward_input if split else times.backward)

        computing, receiving = both(self.computing), both(self.receiving)
        at_once = max(computing, receiving) + _NOT_HIDDEN * min(computing, receiving)
        return max(0.0, both(self.stage(num_blocks)) - _PAIR_OVERHEAD * at_once * num_blocks)


def time_block(
    block: BlockFacts,
    mesh: MeshSizes,
    samples: int,
    machine: Machine,
    dtype: str,
    element: int,
    weights: CubeWeights = "microbatch",
    where: Experts = "whole",
) -> BlockTime:
    """The seconds of a block for a micro-batch of so many samples, which the cube's ranks share.

    Args:
        block: what is computed.
        mesh: the sizes of the cube.
        samples: of the micro-batch, for all ranks of the cube together.
        machine: the rates.
        dtype: of the products.
        element: bytes of a number in it.
        weights: how often weights are gathered. If once a batch, these times are without it.
        where: experts are.
    """
    num_ranks = prod(mesh)
    # of the first cube, as all of them lie alike
    x, y, z = links = [
        machine.link(stride, size) for stride, size in zip((mesh[1] * mesh[2], mesh[2], 1), mesh, strict=True)
    ]
    between = samples / num_ranks * block.traffic / machine.memory_bandwidth / max(1, len(block.products))
    steps = []
    for product in block.products:
        flops, volume = samples * product.flops / num_ranks, product.of(samples).volume(mesh)
        of_x, of_y, of_w = (z, y, x) if product.row_parallel else (y, z, x)
        if product.is_generic:  # its weight may be gathered over all axes: the slowest link counts
            used = [link for link, size in zip(links, mesh, strict=True) if size > 1]
            of_w = min(used or links, key=lambda link: link.bandwidth)
        step = _Step(
            flops / machine.matmul_rate(dtype, (flops / 2) ** (1 / 3)),
            between,
            gather_w=of_w.seconds(element * volume.gather_w),
            gather_x=of_x.seconds(element * volume.gather_x) + z.seconds(element * volume.exchange_x),
            scatter_y=of_y.seconds(element * volume.scatter_y) + y.seconds(element * volume.exchange_y),
            gather_dy=of_y.seconds(element * volume.gather_dy) + y.seconds(element * volume.exchange_dy),
            scatter_dx=of_x.seconds(element * volume.scatter_dx) + z.seconds(element * volume.exchange_dx),
            scatter_dw=of_w.seconds(element * volume.scatter_dw),
        )
        steps.append(step)
    first, *others = steps or [_Step(behind=between)]
    rate = machine.matmul_rate(dtype, float("inf")) * num_ranks / samples
    behind, experts = block.attention_flops / rate, block.experts
    if experts is not None:  # in a type of their own
        of_experts = experts.flops / machine.matmul_rate(experts.dtype or dtype, float("inf")) * samples / num_ranks
        behind += of_experts - experts.flops / rate
    if experts is not None and block.shared_experts(mesh, where):  # tokens are sent, computed with, and sent back
        behind -= of_experts
        used = [link for link, size in zip((y, z), mesh[1:], strict=True) if size > 1]
        link = min(used, key=lambda link: link.bandwidth)
        one_way = link.seconds(element * samples * experts.sent(mesh))
        others += [
            _Step(behind=of_experts, gather_x=one_way, scatter_dx=one_way),
            _Step(scatter_y=one_way, gather_dy=one_way),
        ]
    steps = [replace(first, behind=first.behind + behind), *others]
    if weights == "batch":
        steps = [replace(one, gather_w=0.0, scatter_dw=0.0) for one in steps]
    host = _host(steps, block, machine)

    def with_host(device: PartTimes, num_blocks: int) -> PartTimes:
        if not machine.is_asynchronous:
            return device + host * num_blocks
        return PartTimes(*map(max, device, host * num_blocks))

    one, two = _clocks(steps, 1), _clocks(steps, 2)
    alone = with_host(PartTimes(*(clock.now for clock in one)), 1)
    return BlockTime(
        alone,
        with_host(PartTimes(*(clock.now for clock in two)), 2) + alone * -1,
        with_host(PartTimes(*(clock.computing for clock in one)), 1),
        PartTimes(*(clock.receiving for clock in one)),
    )


@dataclass(frozen=True)
class _Step:
    """Seconds of one product and of what is computed behind it, and of its collectives on the link."""

    product: float = 0.0
    """of its forward, of dX, and of dW each"""
    behind: float = 0.0
    """in the forward"""
    gather_w: float = 0.0
    gather_x: float = 0.0
    scatter_y: float = 0.0
    gather_dy: float = 0.0
    scatter_dx: float = 0.0
    scatter_dw: float = 0.0


def _host(steps: list[_Step], block: BlockFacts, machine: Machine) -> PartTimes:
    """Seconds of the host for one block: operations, and the collectives that it starts and waits for."""

    def collectives(*names: str) -> float:
        return machine.host_collective * sum(bool(getattr(one, name)) for one in steps for name in names)

    calls = machine.host_call * block.calls
    half = calls * _BACKWARD_CALLS / 2
    of_input, of_weight = collectives("gather_dy", "scatter_dx"), collectives("scatter_dw")
    forward = calls + collectives("gather_w", "gather_x", "scatter_y")
    return PartTimes(forward, 2 * half + of_input + of_weight, half + of_input, half + of_weight)


def _clocks(steps: list[_Step], num_blocks: int) -> tuple[Clock, Clock, Clock, Clock]:
    """The parts of a stage's work, in the order of `PartTimes`, each by its own clock."""
    forward, backward, of_input, of_weight = Clock(), Clock(), Clock(), Clock()
    steps = steps * num_blocks
    _forward(forward, steps)
    _backward(backward, steps, weights=True)
    _backward(of_input, steps, weights=False)
    for one in reversed(steps):
        of_weight.compute(one.product)
        of_weight.sum_later(one.scatter_dw)
    of_weight.finish()
    return forward, backward, of_input, of_weight


def _forward(clock: Clock, steps: list[_Step]) -> None:
    ahead: dict[int, float] = {}
    for place, one in enumerate(steps):
        of_w = ahead.pop(place) if place in ahead else clock.start(one.gather_w)
        of_x = clock.start(one.gather_x)
        clock.wait(of_w)
        for following in range(place + 1, min(place + 1 + MAX_AT_ONCE, len(steps))):
            if following not in ahead:
                ahead[following] = clock.start(steps[following].gather_w)
        clock.wait(of_x)
        clock.compute(one.product)
        clock.wait(clock.start(one.scatter_y))
        clock.compute(one.behind)


def _backward(clock: Clock, steps: list[_Step], *, weights: bool) -> None:
    for one in reversed(steps):
        clock.compute(2 * one.behind)
        clock.wait(clock.start(one.gather_dy))
        clock.compute(one.product)
        of_dx = clock.start(one.scatter_dx)
        if weights:
            clock.compute(one.product)
            clock.sum_later(one.scatter_dw)
        clock.wait(of_dx)
    clock.finish()
