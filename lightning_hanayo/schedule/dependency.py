"""Dependency: which action waits for which. The one rule that passes, search, simulation and the runtime share.

    F(s-1) -> F(s) -> F(s+1)            within one micro-batch, down the stages
                |
    B(s-1) <- B(s) <- B(s+1)            and back; B may be split into I (sends the gradient on) and W (waits for its I)

Between two ranks there is a message, whose place follows from these (`communication.py`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import filterfalse

from lightning_hanayo.schedule.table import Action, Kind, Rows, Table

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
