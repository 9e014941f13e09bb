"""The time of one block on one rank of a cube: its products and its collectives on a link that carries one at a time.

W0  X0 |-- product 0 --| Y0 |    attention    | X1 |-- product 1 --| Y1      X: gathered, Y: summed: between products
       |-- W1 --|                              |-- W2 --|                    W: gathered ahead, while others compute

The order is that of `tensor_parallel/product.py`; a test holds it against what the layers really start and wait for.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from typing_extensions import override

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.overlap.pair_time import Segment
from lightning_hanayo.planner.communication_volume import CubeWeights, Keep, Volume
from lightning_hanayo.planner.machine import Link, Machine
from lightning_hanayo.planner.model_facts import BlockFacts, Product

MAX_AT_ONCE = 2
"""weights that are gathered ahead, and gradients of weights that are summed while a backward goes on"""
_BACKWARD_CALLS = 2.1
"""operations of a backward for each of its forward: Llama blocks have 82 for 38, 87 for 40 (docs/benchmarks/h100.md)"""


class Clock:
    """One rank's time: it computes and waits, while its link carries one collective after the other."""

    def __init__(self) -> None:
        self.now = self.computing = self.receiving = self._free = 0.0

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


class SegmentClock(Clock):
    """A clock that also records what the rank does."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[Segment] = []
        self._numbers: dict[float, int] = {}
        """of collectives, by their ends"""

    @override
    def compute(self, seconds: float) -> None:
        super().compute(seconds)
        self.segments.append(Segment(seconds))

    @override
    def start(self, seconds: float) -> float:
        end = super().start(seconds)
        if seconds:
            self._numbers[end] = len(self._numbers)
            self.segments.append(Segment(start=seconds))
        return end

    @override
    def wait(self, end: float) -> None:
        super().wait(end)
        if end in self._numbers:
            self.segments.append(Segment(wait=self._numbers[end]))


@dataclass(frozen=True)
class PartTimes:
    """Seconds of the parts of a micro-batch's work on one stage. `backward` is the backward in one piece."""

    forward: float = 0.0
    backward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def __add__(self, other: "PartTimes") -> "PartTimes":
        return PartTimes(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __mul__(self, factor: float) -> "PartTimes":
        return PartTimes(*(getattr(self, one.name) * factor for one in fields(self)))


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block and one micro-batch: in a stage of its own, and each further one in a stage, whose weights
    are gathered while the one before is computed."""

    alone: PartTimes
    further: PartTimes

    def stage(self, num_blocks: float) -> PartTimes:
        """Of a stage with so many blocks."""
        return self.alone + self.further * (num_blocks - 1)


@dataclass(frozen=True)
class CubeLinks:
    """The links along the axes of a cube of ranks that follow each other."""

    x: Link
    y: Link
    z: Link

    @classmethod
    def of(cls, machine: Machine, mesh: MeshSizes) -> "CubeLinks":
        """Of the first cube, as all of them lie alike."""
        x, y, z = mesh
        return cls(machine.link(0, y * z, x), machine.link(0, z, y), machine.link(0, 1, z))


def time_block(
    block: BlockFacts,
    mesh: MeshSizes,
    samples: int,
    machine: Machine,
    dtype: str,
    element: int,
    keep: Keep = "gathered",
    weights: CubeWeights = "microbatch",
) -> BlockTime:
    """The seconds of a block for a micro-batch of so many samples, which the cube's ranks share.

    Args:
        block: what is computed.
        mesh: the sizes of the cube.
        samples: of the micro-batch, for all ranks of the cube together.
        machine: the rates.
        dtype: of the products.
        element: bytes of a number in it.
        keep: what products save: what they gathered, or shards that are gathered again.
        weights: how often weights are gathered. If once a batch, these times are without it.
    """
    run = _Run(block, mesh, samples, machine, dtype, element, keep, weights)
    one, two = (run.times(num_blocks) for num_blocks in (1, 2))
    return BlockTime(one, two + one * -1)


def segments(
    block: BlockFacts,
    mesh: MeshSizes,
    samples: int,
    machine: Machine,
    dtype: str,
    element: int,
    weights: CubeWeights = "microbatch",
    num_blocks: int = 1,
) -> dict[str, tuple[Segment, ...]]:
    """When a stage of so many of these blocks computes and when it uses the link, in its forward "F", its backward "B"
    and the backward of inputs "I". The other arguments are those of `time_block`.

    The host counts as the device: both actions of a pair need it, and only one of them has it at a time.
    """
    return _Run(block, mesh, samples, machine, dtype, element, "gathered", weights).segments(num_blocks)


class _Run:
    """The block's work, in seconds of the device and of the link."""

    def __init__(
        self,
        block: BlockFacts,
        mesh: MeshSizes,
        samples: int,
        machine: Machine,
        dtype: str,
        element: int,
        keep: Keep,
        weights: CubeWeights,
    ) -> None:
        x, y, z = mesh
        self._num_ranks = x * y * z
        links = CubeLinks.of(machine, mesh)
        self._collectives = [
            _Collectives.of(one, one.volume(samples, mesh, keep), links, element, mesh) for one in block.products
        ] or [_Collectives()]
        if weights == "batch":
            kept = {"gather_w": 0.0, "regather_w": 0.0, "scatter_dw": 0.0}
            self._collectives = [replace(one, **kept) for one in self._collectives]
        self._products = [_product_seconds(one, mesh, samples, machine, dtype) for one in block.products] or [0.0]
        self._between = self._between_products(block, samples, machine, dtype)
        self._host = machine.host_call * block.calls
        self._host_collective = machine.host_collective
        self._is_asynchronous = machine.is_asynchronous

    def _between_products(self, block: BlockFacts, samples: int, machine: Machine, dtype: str) -> list[float]:
        """Seconds of the forward's other work, shared out behind its products; attention is behind the first."""
        share, count = samples / self._num_ranks, len(self._products)
        between = [share * block.traffic / machine.memory_bandwidth / count] * count
        between[0] += share * block.attention_flops / machine.matmul_rate(dtype, float("inf"))
        return between

    def times(self, num_blocks: int) -> PartTimes:
        """Of a stage with so many of these blocks."""
        forward, backward, of_input, of_weight = Clock(), Clock(), Clock(), Clock()
        self._forward(forward, num_blocks)
        self._backward(backward, num_blocks, weights=True)
        self._backward(of_input, num_blocks, weights=False)
        self._weights(of_weight, num_blocks)
        device = PartTimes(forward.now, backward.now, of_input.now, of_weight.now)
        of_host = self._of_host() * num_blocks
        if not self._is_asynchronous:
            return device + of_host
        return PartTimes(*(max(getattr(device, one.name), getattr(of_host, one.name)) for one in fields(device)))

    def segments(self, num_blocks: int) -> dict[str, tuple[Segment, ...]]:
        """What a stage with so many of these blocks does, by kind of action."""
        clocks = {kind: SegmentClock() for kind in ("F", "B", "I")}
        self._forward(clocks["F"], num_blocks)
        self._backward(clocks["B"], num_blocks, weights=True)
        self._backward(clocks["I"], num_blocks, weights=False)
        host = self._of_host() * num_blocks
        hosts = {"F": host.forward, "B": host.backward, "I": host.backward_input}
        return {kind: self._with_host(clock, hosts[kind]) for kind, clock in clocks.items()}

    def _with_host(self, clock: SegmentClock, host: float) -> tuple[Segment, ...]:
        """What was recorded, computing for as long as the host needs, too."""
        device = clock.computing
        busy = max(device, host) if self._is_asynchronous else device + host
        stretch = busy / device if device else 1.0
        return tuple(one._replace(compute=stretch * one.compute) for one in clock.segments)

    def _of_host(self) -> PartTimes:
        """Seconds of the host for one block: operations, and the collectives that it starts and waits for."""

        def collectives(*names: str) -> float:
            started = sum(bool(getattr(one, name)) for one in self._collectives for name in names)
            return self._host_collective * started

        half = self._host * _BACKWARD_CALLS / 2
        of_input = collectives("gather_dy", "scatter_dx", "regather_w")
        of_weight = collectives("scatter_dw", "regather_x")
        forward = collectives("gather_w", "gather_x", "scatter_y")
        return PartTimes(self._host + forward, 2 * half + of_input + of_weight, half + of_input, half + of_weight)

    def _steps(self, num_blocks: int) -> "list[tuple[float, _Collectives, float]]":
        """Each product's seconds and collectives, and the seconds of what is computed behind it."""
        return list(zip(self._products, self._collectives, self._between, strict=True)) * num_blocks

    def _forward(self, clock: Clock, num_blocks: int) -> None:
        steps = self._steps(num_blocks)
        ahead: dict[int, float] = {}
        for place, (seconds, one, behind) in enumerate(steps):
            of_w = ahead.pop(place) if place in ahead else clock.start(one.gather_w)
            of_x = clock.start(one.gather_x)
            clock.wait(of_w)
            for following in range(place + 1, min(place + 1 + MAX_AT_ONCE, len(steps))):
                if following not in ahead:
                    ahead[following] = clock.start(steps[following][1].gather_w)
            clock.wait(of_x)
            clock.compute(seconds)
            clock.wait(clock.start(one.scatter_y))
            clock.compute(behind)

    def _backward(self, clock: Clock, num_blocks: int, *, weights: bool) -> None:
        sums = _Sums(clock)
        for seconds, one, behind in reversed(self._steps(num_blocks)):
            clock.compute(2 * behind)
            of_dy, of_w = clock.start(one.gather_dy), clock.start(one.regather_w)
            of_x = clock.start(one.regather_x) if weights else 0.0
            clock.wait(of_dy)
            clock.wait(of_w)
            clock.compute(seconds)
            of_dx = clock.start(one.scatter_dx)
            if weights:
                clock.wait(of_x)
                clock.compute(seconds)
                sums.add(one.scatter_dw)
            clock.wait(of_dx)
        sums.finish()

    def _weights(self, clock: Clock, num_blocks: int) -> None:
        sums = _Sums(clock)
        for seconds, one, _ in reversed(self._steps(num_blocks)):
            clock.wait(clock.start(one.regather_x))
            clock.compute(seconds)
            sums.add(one.scatter_dw)
        sums.finish()


class _Sums:
    """Gradients of weights that ranks add up while others are computed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: deque[float] = deque()

    def add(self, seconds: float) -> None:
        """Start one, after an earlier one has ended if too many are under way."""
        self._pending.append(self._clock.start(seconds))
        if len(self._pending) > MAX_AT_ONCE:
            self._clock.wait(self._pending.popleft())

    def finish(self) -> None:
        """Wait for all."""
        for end in self._pending:
            self._clock.wait(end)


@dataclass(frozen=True)
class _Collectives:
    """Seconds that one product's collectives take the link; none where a block has no linear layer."""

    gather_w: float = 0.0
    gather_x: float = 0.0
    scatter_y: float = 0.0
    gather_dy: float = 0.0
    scatter_dx: float = 0.0
    scatter_dw: float = 0.0
    regather_w: float = 0.0
    regather_x: float = 0.0

    @classmethod
    def of(cls, product: Product, volume: Volume, links: CubeLinks, element: int, mesh: MeshSizes) -> "_Collectives":
        of_x, of_y = (links.z, links.y) if product.layer.row_parallel else (links.y, links.z)
        of_w = _slowest((links.x, links.y, links.z), mesh) if product.is_generic else links.x

        def seconds(link: Link, *elements: float) -> float:
            return sum(link.seconds(element * one) for one in elements)

        return cls(
            gather_w=seconds(of_w, volume.gather_w),
            gather_x=seconds(of_x, volume.gather_x) + seconds(links.z, volume.exchange_x),
            scatter_y=seconds(of_y, volume.scatter_y) + seconds(links.y, volume.exchange_y),
            gather_dy=seconds(of_y, volume.gather_dy) + seconds(links.y, volume.exchange_dy),
            scatter_dx=seconds(of_x, volume.scatter_dx) + seconds(links.z, volume.exchange_dx),
            scatter_dw=seconds(of_w, volume.scatter_dw),
            regather_w=seconds(of_w, volume.regather_w),
            regather_x=seconds(of_x, volume.regather_x),
        )


def _slowest(links: Sequence[Link], mesh: MeshSizes) -> Link:
    used = [link for link, size in zip(links, mesh, strict=True) if size > 1]
    return min(used or links, key=lambda link: link.bandwidth)


def _product_seconds(product: Product, mesh: MeshSizes, samples: int, machine: Machine, dtype: str) -> float:
    """Seconds of one rank's part of the product: of its forward, of dX, and of dW each."""
    x, y, z = mesh
    flops = samples * product.flops / (x * y * z)
    return flops / machine.matmul_rate(dtype, (flops / 2) ** (1 / 3))
