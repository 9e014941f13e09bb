"""CostModel: how long actions and messages take. The unit of time is the caller's (T_F, or seconds)."""

from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.number import check_numbers
from lightning_hanayo.schedule.table import Schedule

Cost = float | tuple[float, ...]


class WrongLength(HanayoError):
    """A tuple of costs has too few or too many values for a schedule."""

    def __init__(self, field: str, given: int, schedule: str, wanted: int) -> None:
        super().__init__(f"CostModel: {field} has {given} values, schedule {schedule!r} {wanted} stages")
        self.field, self.given, self.wanted = field, given, wanted


@dataclass(frozen=True)
class CostModel:
    """Times of one micro-batch. A number is for one rank's whole share of the model (a stage takes its part of it); a
    tuple (or a list) gives each stage's own time (where the model is there twice, one copy's are enough). `B` takes
    input plus weight time.

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
    replica_reduce: Cost = 0.0
    """what summing them over a stage and its replica adds (chimera), without a data axis too"""
    message_between_nodes: float | None = None
    """one hop between ranks of different nodes; `message`, a number then, is the hop within a node"""
    ranks_per_node: int | None = None
    """pipeline ranks 0 to ranks_per_node - 1 are the first node, and so on"""

    def __post_init__(self) -> None:
        check_numbers(self, "a cost is a finite number of at least 0, or one per stage")
        self._check_nodes()

    def _check_nodes(self) -> None:
        nodes = (self.message_between_nodes, self.ranks_per_node)
        if nodes == (None, None):
            return
        numbers = not any(value is None or isinstance(value, tuple) for value in (self.message, *nodes))
        if not numbers or not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise HanayoError(
                f"CostModel: message={self.message!r}, message_between_nodes={nodes[0]!r}, ranks_per_node={nodes[1]!r}"
                "; hops by node take two numbers and a whole number of ranks of at least 1, all three; a tuple of "
                "messages already says what each hop takes, so leave the other two out"
            )

    def scaled(self, factor: float) -> "CostModel":
        """The same in another unit of time: all times by `factor`.

        Example:
            >>> CostModel(forward=0.02, backward_input=(0.1, 0.2), message=0.001).scaled(1e3).backward_input
            (100.0, 200.0)
        """
        times = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "ranks_per_node"}
        return replace(self, **{name: _by(factor, time) for name, time in times.items()})

    def of(self, schedule: Schedule, action: Action) -> float:
        """How long `action` takes in `schedule`."""
        match action.kind:
            case Kind.F:
                return self._stage("forward", schedule, action.stage)
            case Kind.I:
                return self._stage("backward_input", schedule, action.stage)
            case Kind.W:
                return self._stage("backward_weight", schedule, action.stage)
            case Kind.B:
                split = ("backward_input", "backward_weight")
                return sum(self._stage(part, schedule, action.stage) for part in split)
            case Kind.REDUCE_GRAD:
                twins = self._stage("replica_reduce", schedule, action.stage) if schedule.replica_of else 0.0
                return self._stage("gradient_reduce", schedule, action.stage) + twins
            case Kind.SEND_F | Kind.RECV_B:
                return self.hop(schedule, action.stage)
            case Kind.RECV_F | Kind.SEND_B:
                return self.hop(schedule, action.stage - 1)

    def hop(self, schedule: Schedule, stage: int) -> float:
        """How long a message between `stage` and `stage + 1` takes, were they on different ranks."""
        if isinstance(self.message, tuple):
            return self._own("message", schedule, stage)
        if self.message_between_nodes is None or self.ranks_per_node is None:
            return self.message
        here, there = (rank // self.ranks_per_node for rank in schedule.stage_ranks[stage : stage + 2])
        return self.message if here == there else self.message_between_nodes

    def _stage(self, name: str, schedule: Schedule, stage: int) -> float:
        value = getattr(self, name)
        return self._own(name, schedule, stage) if isinstance(value, tuple) else value * schedule.share_of(stage)

    def _own(self, name: str, schedule: Schedule, stage: int) -> float:
        values: tuple[float, ...] = getattr(self, name)
        wanted = schedule.chain_length - schedule.loss_stage
        fitting = {wanted, schedule.chain_length, schedule.num_stages}
        if name == "message":
            fitting.add(wanted - 1)  # one per border
        if len(values) not in fitting:
            raise WrongLength(name, len(values), schedule.name, wanted)
        place = stage if len(values) == schedule.num_stages else stage % schedule.chain_length
        return values[place] if place < len(values) else 0.0


def _by(factor: float, time: Any) -> Any:
    if time is None:
        return None
    return tuple(factor * one for one in time) if isinstance(time, tuple) else factor * time
