"""Action: one thing that a pipeline rank does (stage, kind, micro-batch), and its text form such as "3I2"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_hanayo.errors import HanayoError


class Kind(StrEnum):
    """What an action does. The values are the middle part of a cell in torch's CSV tables."""

    F = "F"  # forward of one stage
    B = "B"  # full backward: input and weight gradient in one piece
    I = "I"  # noqa: E741 - the papers' name; input gradient only
    W = "W"  # weight gradient only
    SEND_F = "SEND_F"  # the stage sends its output to the next stage
    RECV_F = "RECV_F"  # the stage receives its input from the previous stage
    SEND_B = "SEND_B"  # the stage sends its input's gradient to the previous stage
    RECV_B = "RECV_B"  # the stage receives its output's gradient from the next stage
    REDUCE_GRAD = "REDUCE_GRAD"  # the stage's weight gradients are summed over the data axis

    __hash__ = str.__hash__  # Enum's own hash is a Python call, and actions are hashed very often

    @property
    def is_compute(self) -> bool:
        """Whether it computes, so that a compute-only table may hold it."""
        return self in COMPUTE

    @property
    def is_message(self) -> bool:
        """Whether it sends to or receives from another rank of the pipeline."""
        return self in MESSAGE

    @property
    def is_forward(self) -> bool:
        """Whether it computes, sends or receives activations; the other actions concern gradients."""
        return self in FORWARD


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
MESSAGE = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})

_CELL = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do. `microbatch` is None only for `REDUCE_GRAD`, which runs once per step.

    Example:
        >>> str(Action(3, Kind.I, 2)), Action.parse("2REDUCE_GRAD").microbatch
        ('3I2', None)
    """

    stage: int
    kind: Kind
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that `text` names: `"0F0"`, `"3I2"`, `"2SEND_F0"`, `"2REDUCE_GRAD"`.

        Raises:
            HanayoError: `text` names no action.
        """
        match = _CELL.fullmatch(text.strip())
        if match is None or match[2] not in Kind.__members__:
            raise HanayoError(_not_an_action(text, f"the kinds are {', '.join(Kind)}"))
        kind = Kind(match[2])
        if (kind is Kind.REDUCE_GRAD) != (match[3] == ""):
            wanted = "takes no micro-batch" if kind is Kind.REDUCE_GRAD else "needs a micro-batch"
            raise HanayoError(_not_an_action(text, f"{kind} {wanted}"))
        return cls(int(match[1]), kind, int(match[3]) if match[3] else None)


Rows = Sequence[Sequence[Action]]
"""One list of actions per pipeline rank."""


def _not_an_action(text: str, why: str) -> str:
    return f"{text!r} is no action: expected <stage><kind><micro-batch>, as in 0F0, 3I2 or 2REDUCE_GRAD; {why}"
