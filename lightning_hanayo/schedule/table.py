"""The data of a schedule: actions such as "3I2" (stage, kind, micro-batch), the table, and the placement of stages.

    zigzag, P = 4, W = 1                     loop, P = 4, 2 stages per rank

    rank 0   0                   7           rank 0   0        4
    rank 1     1               6             rank 1     1        5
    rank 2       2           5               rank 2       2        6
    rank 3         3       4                 rank 3         3        7

A zig-zag turns at the ends, so stages 3 and 4 are on one rank, and it begins and ends on rank 0. A loop starts again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from reprlib import repr as repr_of

from lightning_hanayo.errors import HanayoError


class Kind(StrEnum):
    """The kinds of actions. The values are the middle part of a cell in torch's CSV tables."""

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

_CELL = re.compile(r"(\d{1,18})([A-Z]+(?:_[A-Z]+)?)(\d{0,18})")


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
        if match is None or match[2] not in Kind.__members__ or (match[2] == Kind.REDUCE_GRAD) != (match[3] == ""):
            expected = f"<stage><kind><micro-batch>, as in 0F0, 3I2 or 2REDUCE_GRAD; the kinds are {', '.join(Kind)}"
            raise HanayoError(f"{repr_of(text)} is no action: expected {expected}")
        return cls(int(match[1]), Kind(match[2]), int(match[3]) if match[3] else None)


Rows = Sequence[Sequence[Action]]
"""One list of actions per pipeline rank."""


@dataclass(frozen=True)
class Table:
    """The data of a schedule. `Schedule` adds reading and writing of CSV files; builders return a `Schedule`."""

    name: str
    stage_ranks: tuple[int, ...]
    """the pipeline rank of each stage"""
    actions: tuple[tuple[Action, ...], ...]
    """compute only, one tuple per pipeline rank"""
    num_microbatches: int
    loss_stage: bool = False
    """whether the last stage holds only head and loss (see `with_loss_stage`)"""
    reduction_order: tuple[int, ...] = ()
    """the order of stages in which all ranks start their gradient reductions; empty: as the gradients are ready"""
    pairs: frozenset[tuple[Action, Action]] = frozenset()
    """actions of two micro-batches that a rank works on at once: neighbours in its row, in this order"""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages, the loss stage included."""
        return len(self.stage_ranks)

    @cached_property
    def partner_of(self) -> dict[Action, Action]:
        """For the first action of each pair the second."""
        return dict(self.pairs)

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in self.actions]
        for stage, rank in enumerate(self.stage_ranks):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on pipeline rank `rank`, ascending."""
        return self._stages[rank]

    def share_of(self, stage: int) -> float:
        """The part of its rank's share of the model that `stage` holds: 1/(stages per rank), 0 for the loss stage."""
        if self.loss_stage and stage == self.num_stages - 1:
            return 0.0
        rank = self.stage_ranks[stage]
        has_loss = self.loss_stage and self.stage_ranks[-1] == rank
        return 1 / (len(self._stages[rank]) - has_loss)


def zigzag(num_ranks: int, num_waves: int) -> tuple[int, ...]:
    """The rank of each of the 2WP stages of W waves (Hanayo, section 3).

    Example:
        >>> zigzag(3, 1)
        (0, 1, 2, 2, 1, 0)
    """
    down = tuple(range(num_ranks))
    return (down + down[::-1]) * num_waves


def loop(num_ranks: int, num_stages_per_rank: int = 1) -> tuple[int, ...]:
    """The rank of each of the VP stages in round-robin order.

    Example:
        >>> loop(3, 2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * num_stages_per_rank
