"""The dependency rule of tables with communication, by which tests see that completed tables run to their end.

Between two ranks there is a message: F(s-1) -> SEND_F(s-1) -> RECV_F(s) -> F(s).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import filterfalse

from lightning_hanayo.schedule.table import Action, Kind, Rows, Table, source_stage

Dependencies = Mapping[Action, tuple[Action, ...]]
"""For each action of a table, the actions of the same table that it waits for."""


def waits_for(action: Action, num_stages: int, num_microbatches: int = 1) -> tuple[tuple[Action, ...], ...]:
    """The actions that `action` waits for: of each inner tuple, the first one that the table holds.

    So a stage's input has arrived with its receive if the table has one, else with the previous stage's forward.
    `num_microbatches` matters for `REDUCE_GRAD` only, which waits for every weight gradient of its stage.

    Example:
        >>> [[str(a) for a in one_of] for one_of in waits_for(Action(1, Kind.B, 0), num_stages=3)]
        [['1F0'], ['1RECV_B0', '2B0', '2I0']]
    """
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.F | Kind.RECV_F | Kind.RECV_B:
            return _inputs(action, num_stages)
        case Kind.B | Kind.I:
            return ((Action(stage, Kind.F, microbatch),), *_inputs(action, num_stages))
        case Kind.W | Kind.SEND_F:
            return ((Action(stage, Kind.I if action.kind is Kind.W else Kind.F, microbatch),),)
        case Kind.SEND_B:
            return (_input_gradients(stage, microbatch),)
        case Kind.REDUCE_GRAD:
            return tuple((Action(stage, Kind.B, m), Action(stage, Kind.W, m)) for m in range(num_microbatches))


def _inputs(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """The actions that bring another stage's output: the receive, if the table holds one, else its computation."""
    stage, microbatch, source = action.stage, action.microbatch, source_stage(action, num_stages)
    if source is None:
        return ()
    match action.kind:
        case Kind.F:
            return ((Action(stage, Kind.RECV_F, microbatch), Action(source, Kind.F, microbatch)),)
        case Kind.RECV_F | Kind.RECV_B:
            send = Kind.SEND_F if action.kind is Kind.RECV_F else Kind.SEND_B
            return ((Action(source, send, microbatch),),)
        case _:
            return ((Action(stage, Kind.RECV_B, microbatch), *_input_gradients(source, microbatch)),)


def _input_gradients(stage: int, microbatch: int | None) -> tuple[Action, ...]:
    return (Action(stage, Kind.B, microbatch), Action(stage, Kind.I, microbatch))


def waits_in(rows: Rows, num_stages: int, num_microbatches: int) -> dict[Action, tuple[Action, ...]]:
    """The rule applied to one table. Nothing waits for an action that is missing (validation reports it)."""
    present = {action for row in rows for action in row}
    return {
        action: tuple(
            held
            for one_of in waits_for(action, num_stages, num_microbatches)
            if (held := next(filter(present.__contains__, one_of), None))
        )
        for action in present
    }


def table_waits(table: Table, rows: Rows | None = None) -> dict[Action, tuple[Action, ...]]:
    """The rule applied to the actions of `table`, or to other `rows` of the same stages and micro-batches."""
    rows = table.actions if rows is None else rows
    return waits_in(rows, table.num_stages, table.num_microbatches)


def executable_order(rows: Rows, waits: Dependencies) -> Iterator[Action]:
    """The actions in an order in which they can run, each rank in its row's order. It ends early where all ranks wait.

    A compute action holds up its rank until all that it waits for is done. Communication doesn't: it is posted when its
    rank reaches it, and is done once all that it waits for is. Linear in the number of actions: a rank that waits is
    woken by the action it waits for.
    """
    done: set[Action] = set()
    waiting: dict[Action, list[tuple[Sequence[Action], int]]] = defaultdict(list)
    awake: list[tuple[Sequence[Action], int]] = [(row, 0) for row in reversed(rows)]
    while awake:
        row, start = awake.pop()
        for position in range(start, len(row)):
            action = row[position]
            missing = next(filterfalse(done.__contains__, waits[action]), None)
            if missing is None:
                done.add(action)
                yield action
                awake += waiting.pop(action, ())
            elif action.kind.is_compute:
                waiting[missing].append((row, position))
                break
            else:  # it waits alone, and its rank goes on
                waiting[missing].append(((action,), 0))
