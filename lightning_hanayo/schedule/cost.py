"""CostModel: how long actions and messages take. The unit of time is the caller's (T_F, or seconds)."""

from dataclasses import dataclass, fields

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.table import Schedule

Cost = float | tuple[float, ...]


@dataclass(frozen=True)
class CostModel:
    """Times of one micro-batch. A number is for one rank's whole share of the model (a stage takes its part of it); a
    tuple gives each stage's own time. `B` takes input plus weight time.

    Example:
        >>> CostModel(forward=1.0, backward_input=1.0, backward_weight=1.0)   # the paper's T_F = 1, T_B = 2
        CostModel(forward=1.0, backward_input=1.0, backward_weight=1.0, message=0.0, gradient_reduce=0.0)
    """

    forward: Cost = 1.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    message: Cost = 0.0
    """one hop between two ranks (T_C); as a tuple: between stage s and s + 1, in either direction"""
    gradient_reduce: Cost = 0.0
    """summing the gradients of a rank's whole share over the data axis, once per step"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or any(not one >= 0 for one in values):
                raise HanayoError(
                    f"CostModel: {field.name}={value!r}; a cost is a number of at least 0, or one per stage"
                )

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
                return self._stage("gradient_reduce", schedule, action.stage)
            case Kind.SEND_F | Kind.RECV_B:
                return self.hop(schedule, action.stage)
            case Kind.RECV_F | Kind.SEND_B:
                return self.hop(schedule, action.stage - 1)

    def hop(self, schedule: Schedule, stage: int) -> float:
        """How long a message between `stage` and `stage + 1` takes, were they on different ranks."""
        if isinstance(self.message, tuple):
            return self._own("message", schedule, stage)
        return self.message

    def _stage(self, name: str, schedule: Schedule, stage: int) -> float:
        value = getattr(self, name)
        return self._own(name, schedule, stage) if isinstance(value, tuple) else value * schedule.share_of(stage)

    def _own(self, name: str, schedule: Schedule, stage: int) -> float:
        values: tuple[float, ...] = getattr(self, name)
        wanted = schedule.num_stages - schedule.loss_stage
        if len(values) not in (wanted, schedule.num_stages):
            raise HanayoError(f"CostModel: {name} has {len(values)} values, schedule {schedule.name!r} {wanted} stages")
        return values[stage] if stage < len(values) else 0.0
