"""The data of a schedule: actions such as "3I2" (stage, kind, micro-batch), the table, and the placement of stages.

    zigzag, P = 4, W = 1                     loop, P = 4, 2 stages per rank

    rank 0   0                   7           rank 0   0        4
    rank 1     1               6             rank 1     1        5
    rank 2       2           5               rank 2       2        6
    rank 3         3       4                 rank 3         3        7

A zig-zag turns at the ends, so stages 3 and 4 are on one rank, and it begins and ends on rank 0. A loop starts again.

Dependency: which action waits for which. The one rule that passes, search, simulation and the runtime share.

    F(s-1) -> F(s) -> F(s+1)            within one micro-batch, down the stages
                |
    B(s-1) <- B(s) <- B(s+1)            and back; B may be split into I (sends the gradient on) and W (waits for its I)

Between two ranks there is a message, whose place follows from these (`communication.py`).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import filterfalse
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


Dependencies = Mapping[Action, tuple[Action, ...]]
"""For each action of a table, the actions of the same table that it waits for."""


def waits_for(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """The actions that a compute action waits for: of each inner tuple, the first one that the table holds.

    Example:
        >>> [[str(a) for a in one_of] for one_of in waits_for(Action(1, Kind.B, 0), num_stages=3)]
        [['1F0'], ['2B0', '2I0']]
    """
    if action.kind is Kind.W:
        return ((Action(action.stage, Kind.I, action.microbatch),),)
    inputs = _inputs(action, num_stages)
    return inputs if action.kind is Kind.F else ((Action(action.stage, Kind.F, action.microbatch),), *inputs)


def source_stage(action: Action, num_stages: int) -> int | None:
    """The stage that makes the input of `action`, or the message that it receives. None: no other stage does.

    Example:
        >>> [source_stage(Action.parse(cell), 4) for cell in ("1F0", "1B0", "1RECV_B0", "1SEND_F0", "0F0")]
        [0, 2, 2, None, None]
    """
    if action.kind in (Kind.F, Kind.RECV_F):
        return action.stage - 1 if action.stage > 0 else None
    if action.kind in (Kind.B, Kind.I, Kind.RECV_B):
        return action.stage + 1 if action.stage + 1 < num_stages else None
    return None


def target_stage(action: Action, num_stages: int) -> int | None:
    """The stage that works on the output of `action`, or the message that it sends. None: no other stage does."""
    if action.kind in (Kind.F, Kind.SEND_F):
        return action.stage + 1 if action.stage + 1 < num_stages else None
    if action.kind in (Kind.B, Kind.I, Kind.SEND_B):
        return action.stage - 1 if action.stage > 0 else None
    return None


def _inputs(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """The actions that compute another stage's output, which `action` works on."""
    source = source_stage(action, num_stages)
    kinds = (Kind.F,) if action.kind is Kind.F else (Kind.B, Kind.I)
    return () if source is None else (tuple(Action(source, kind, action.microbatch) for kind in kinds),)


def waits_in(rows: Rows, num_stages: int) -> dict[Action, tuple[Action, ...]]:
    """The rule applied to one table. Nothing waits for an action that is missing (validation reports it)."""
    present = {action for row in rows for action in row}
    return {
        action: tuple(
            held
            for one_of in waits_for(action, num_stages)
            if (held := next(filter(present.__contains__, one_of), None))
        )
        for action in present
    }


def cell_waits(table: Table) -> dict[Action, tuple[Action, ...]]:
    """The rule applied to `table`, where a pair runs once both of its actions can: so the first one waits for both."""
    waits = waits_in(table.actions, table.num_stages)
    for first, second in table.pairs:
        waits[first] = tuple(dict.fromkeys((*waits[first], *waits[second])))
    return waits


def producers(table: Table) -> dict[Action, Action]:
    """For each compute action that works on another stage's output: the action that computes this output."""
    present = {action for row in table.actions for action in row}
    return {
        action: producer
        for action in present
        for one_of in _inputs(action, table.num_stages)
        if (producer := next(filter(present.__contains__, one_of), None))
    }


def last_gradients(table: Table) -> dict[int, int]:
    """Where in its rank's row each stage makes its last weight gradient, for stages that make any."""
    ending = (Kind.B, Kind.W)
    return {one.stage: at for row in table.actions for at, one in enumerate(row) if one.kind in ending}


def executable_order(rows: Rows, waits: Dependencies) -> Iterator[Action]:
    """The actions in an order in which they can run, each rank in its row's order. It ends early where all ranks wait.

    Linear in the number of actions: a rank that waits is woken by the action it waits for.
    """
    done: set[Action] = set()
    waiting: dict[Action, list[tuple[Sequence[Action], int]]] = defaultdict(list)
    awake: list[tuple[Sequence[Action], int]] = [(row, 0) for row in reversed(rows)]
    while awake:
        row, start = awake.pop()
        for position in range(start, len(row)):
            action = row[position]
            missing = next(filterfalse(done.__contains__, waits[action]), None)
            if missing is not None:
                waiting[missing].append((row, position))
                break
            done.add(action)
            yield action
            awake += waiting.pop(action, ())
