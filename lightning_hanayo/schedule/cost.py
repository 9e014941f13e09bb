"""CostModel: how long actions and messages take. The unit of time is the caller's (T_F, or seconds).

Also how long two actions of a rank take that run at once: one device computes, one link carries collectives one after
the other, and the device changes hands wherever an action waits.

    F    start |compute| wait ...                |compute|
    B                  start |compute| wait ...            |compute|
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.number_checks import check_numbers, is_number, is_size
from lightning_hanayo.schedule.table import Action, Kind, Table

Cost = float | tuple[float, ...]
_NO_TIMES = ("ranks_per_node", "segments")
_PARTS = {
    Kind.F: ("forward",),
    Kind.I: ("backward_input",),
    Kind.W: ("backward_weight",),
    Kind.B: ("backward_input", "backward_weight"),
}


class Segment(NamedTuple):
    """A part of an action: compute for a while, then start a collective, or wait for one, or neither."""

    compute: float = 0.0
    """how long it takes the device"""
    start: float | None = None
    """how long the collective takes the link which starts then; the first one that starts has number 0"""
    wait: int | None = None
    """the number of the collective whose result is needed then"""

    def scaled(self, factor: float) -> "Segment":
        """The same in another unit of time."""
        start = None if self.start is None else factor * self.start
        return self._replace(compute=factor * self.compute, start=start)


Segments = Sequence[Segment]
"""All of an action, in order."""


@dataclass(frozen=True)
class PairRun:
    """Actions that have taken turns."""

    ends: tuple[float, ...]
    """the time until each has ended"""
    link_end: float
    """the time until the link has carried everything: collectives that nothing waits for, such as sums of weights'
    gradients, may still be under way when all actions have ended"""

    @property
    def length(self) -> float:
        """Until all have ended and the link is free: the next action begins with collectives, which queue up."""
        return max(*self.ends, self.link_end)


def run_by_turns(*actions: Segments) -> PairRun:
    """One action alone, or two at once as `DeviceTurns` runs them; all are ready at 0, and the first one begins."""
    now = link_end = 0.0
    ends, ended = [0.0 for _ in actions], object()

    def run(number: int, segments: Segments) -> Iterator[None]:
        nonlocal now, link_end
        carried: list[float] = []
        for compute, start, wait in segments:
            now += compute
            if start is not None:
                link_end = max(now, link_end) + start
                carried.append(link_end)
            if wait is not None:
                yield  # the other one has the device
                now = max(now, carried[wait])
        ends[number] = now

    waiting = deque(run(*numbered) for numbered in enumerate(actions))
    while waiting:
        turn = waiting.popleft()
        if next(turn, ended) is not ended:
            waiting.append(turn)
    return PairRun(tuple(ends), link_end)


def run_alone(segments: Segments) -> float:
    """How long an action takes that has device and link to itself."""
    return run_by_turns(segments).ends[0]


def gather_compute_scatter(link: float = 1.0) -> tuple[tuple[str, Segments], ...]:
    """Segments of actions that gather, compute, and scatter their results: `CostModel.segments`.

    Args:
        link: how long both collectives together take the link, in the time of the compute.
    """
    part = (Segment(start=link / 2), Segment(wait=0), Segment(1.0, start=link / 2), Segment(wait=1))
    return tuple((kind, part) for kind in (Kind.F, Kind.B, Kind.I))


@dataclass(frozen=True)
class CostModel:
    """Times of one micro-batch. A number is the time of one rank's whole share of the model, divided among its stages.
    A tuple (or a list) gives each stage's own time. `B` takes the input time plus the weight time.

    Example:
        >>> CostModel(forward=1.0, backward_input=1.0, backward_weight=1.0)     # the paper's T_F = 1, T_B = 2
        >>> CostModel(message=0.02, message_between_nodes=0.1, ranks_per_node=8)
    """

    forward: Cost = 1.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    message: Cost = 0.0
    """one hop between two ranks (T_C); as a tuple: between stage s and s + 1, in either direction (S - 1 values)"""
    gradient_reduce: Cost = 0.0
    """summing the gradients of a rank's whole share over the data axis, once per step"""
    message_between_nodes: float | None = None
    """one hop between ranks of different nodes; `message`, a number then, is the hop within a node"""
    per_action: float = 0.0
    """the host's time for each forward, input gradient, weight gradient and whole backward of a stage, however little
    the stage holds. More waves have more actions, so with it fewer of them may be faster"""
    ranks_per_node: int | None = None
    """pipeline ranks 0 to ranks_per_node - 1 are the first node, and so on"""
    segments: tuple[tuple[str, Segments], ...] = ()
    """for kinds of actions ("F", "B", "I"), when they compute and when they use their rank's link, in any unit: the
    times above say how long they take alone. A pair takes as long as both actions one after the other, unless one of
    them can compute while the other one waits for its link"""

    def __post_init__(self) -> None:
        check_numbers(self, "a cost is a finite number of at least 0, or one per stage", but=("segments",))
        self._check_segments()
        if not is_number(self.per_action):
            raise HanayoError(f"CostModel: per_action={self.per_action!r}; expected one number for all stages")
        nodes = (self.message_between_nodes, self.ranks_per_node)
        if nodes == (None, None):
            return
        numbers = not any(value is None or isinstance(value, tuple) for value in (self.message, *nodes))
        if not numbers or not is_size(self.ranks_per_node):
            given = f"message={self.message!r}, message_between_nodes={nodes[0]!r}, ranks_per_node={nodes[1]!r}"
            raise HanayoError(f"CostModel: {given}; hops by node need all three, as numbers; a tuple of hops no other")

    def _check_segments(self) -> None:
        given = tuple((kind, tuple(Segment(*one) for one in segments)) for kind, segments in self.segments)
        object.__setattr__(self, "segments", given)  # of lists, where they come from a file
        kinds = {kind for kind, segments in given if _is_action(segments)}
        if len(kinds) < len(given) or not kinds <= {"F", "B", "I"}:
            expected = "some that take time and wait for what has started, of F, B and I, each once"
            raise HanayoError(f"CostModel: segments={given}; expected {expected}")

    def pair(self, table: Table, first: Action, second: Action) -> tuple[float, ...]:
        """How long each of two actions of a rank takes if it begins both at once."""
        return run_by_turns(self.segments_of(table, first), self.segments_of(table, second)).ends

    def segments_of(self, table: Table, action: Action) -> tuple[Segment, ...]:
        """When an action computes and when it uses the link, in the unit of the costs."""
        takes = self.of(table, action)
        given = dict(self.segments).get(action.kind)
        if given is None:
            return (Segment(takes),)
        factor = takes / run_alone(given)
        return tuple(one.scaled(factor) for one in given)

    def scaled(self, factor: float) -> "CostModel":
        """The same costs in another unit of time: all times multiplied by `factor`.

        Example:
            >>> CostModel(forward=0.02, backward_input=(0.1, 0.2), message=0.001).scaled(1e3).backward_input
            (100.0, 200.0)
        """
        scaled: dict[str, Any] = {
            name: tuple(factor * one for one in time) if isinstance(time, tuple) else factor * time
            for name, time in self._times.items()
            if time is not None
        }
        return replace(self, **scaled)

    def merged(self, num_stages: int) -> "CostModel":
        """Per-stage costs for fewer, larger stages, each of which holds an equal number of the smaller ones in a row.

            8 stages   1 1 1 2 | 1 1 1 1        compute times are added; a message leaves the last stage of each group
            2 stages         5 | 4

        Raises:
            HanayoError: the given number of values can't be divided so.
        """
        return replace(self, **{name: _merged(name, value, num_stages) for name, value in self._times.items()})

    @property
    def is_per_stage(self) -> bool:
        """Whether any cost is a tuple of per-stage values."""
        return any(isinstance(time, tuple) for time in self._times.values())

    @property
    def _times(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NO_TIMES}

    def of(self, table: Table, action: Action) -> float:
        """How long `action` takes in `table`."""
        match action.kind:
            case Kind.F | Kind.I | Kind.W | Kind.B:
                return self.per_action + sum(self._stage(part, table, action.stage) for part in _PARTS[action.kind])
            case Kind.REDUCE_GRAD:
                return self._stage("gradient_reduce", table, action.stage)
            case Kind.SEND_F | Kind.RECV_B:
                return self.hop(table, action.stage)
            case Kind.RECV_F | Kind.SEND_B:
                return self.hop(table, action.stage - 1)

    def hop(self, table: Table, stage: int) -> float:
        """How long a message between `stage` and `stage + 1` takes if they are on different ranks."""
        if isinstance(self.message, tuple):
            return self._of_stage("message", table, stage)
        if self.message_between_nodes is None or self.ranks_per_node is None:
            return self.message
        here, there = (rank // self.ranks_per_node for rank in table.stage_ranks[stage : stage + 2])
        return self.message if here == there else self.message_between_nodes

    def _stage(self, name: str, table: Table, stage: int) -> float:
        value = getattr(self, name)
        return self._of_stage(name, table, stage) if isinstance(value, tuple) else value * table.share_of(stage)

    def _of_stage(self, name: str, table: Table, stage: int) -> float:
        values: tuple[float, ...] = getattr(self, name)
        wanted = table.num_stages - table.loss_stage
        fitting = {wanted, table.num_stages}  # the loss stage takes no time unless a value says so
        if name == "message":
            fitting.add(wanted - 1)  # one per pair of neighbouring stages
        if len(values) not in fitting:
            given = f"CostModel: {name} has {len(values)} values, schedule {table.name!r} {wanted} stages"
            raise HanayoError(f"{given}; give one value per stage, or one number for a rank's whole share")
        return values[stage] if stage < len(values) else 0.0


def _is_action(segments: Segments) -> bool:
    """Whether they wait for collectives that have started, and take time."""
    started = accumulate(one.start is not None for one in segments)
    waits = all(one.wait is None or 0 <= one.wait < number for one, number in zip(segments, started, strict=True))
    return waits and bool(segments) and run_alone(segments) > 0


def _merged(name: str, value: Any, num_stages: int) -> Any:
    if not isinstance(value, tuple) or len(value) == num_stages:
        return value
    if name == "message" and (len(value) + 1) % num_stages == 0:
        value = (*value, 0.0)  # one per pair of neighbouring stages was given
    size, rest = divmod(len(value), num_stages)
    if rest or not size:
        raise HanayoError(f"{name} has {len(value)} values, which can't be shared evenly by {num_stages} stages")
    if name == "message":
        return value[size - 1 :: size]
    return tuple(sum(value[start : start + size]) for start in range(0, len(value), size))
