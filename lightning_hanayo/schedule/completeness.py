"""Completeness: checks that a table's own communication has every message once, in an order that can run to its end.

    rank 0   0F0 0SEND_F0 0RECV_B0 0B0              every message: sent by its producer's rank after the producer,
    rank 1   1RECV_F0 1F0 1B0 1SEND_B0              received by its consumer's rank before the consumer

Two ranks match their messages by order alone (NCCL), so a rank must receive from another in the order of its sends.
The error draws the table as text and marks the wrong action.
"""

from collections import defaultdict
from itertools import pairwise
from typing import NoReturn

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.communication import complete
from lightning_hanayo.schedule.dependency import executable_order, table_waits, target_stage
from lightning_hanayo.schedule.table import Action, Kind, Rows, Table

Positions = dict[Action, tuple[int, int]]
"""The rank of each action, and its position in that rank's row."""


def check_communication(table: Table, rows: Rows) -> None:
    """Accept `rows`: the compute actions of the valid `table` with all of its communication, or with none.

    Raises `HanayoError` if a message is missing, superfluous or misplaced; it draws the table and marks the action.
    """
    found: Positions = {}
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            if action in found and not action.kind.is_compute:
                reject(table, (rank, position), f"{action} appears twice, first on rank {found[action][0]}", rows)
            found[action] = (rank, position)
    if not any(action.kind.is_message for action in found):
        return
    expected = {a: rank for rank, row in enumerate(complete(table)) for a in row if a.kind.is_message}
    for action, cell in found.items():
        if action.kind.is_message and expected.get(action) != cell[0]:
            belongs = f"it belongs on rank {expected[action]}" if action in expected else "nothing needs that message"
            reject(table, cell, f"{action} doesn't belong here: {belongs}", rows)
    waits = table_waits(table, rows)
    for action, rank in expected.items():
        if action not in found:
            # next to the action that computes the message, or works on it
            kinds = (Kind.F,) if action.kind.is_forward else (Kind.B, Kind.I)
            wanted = [Action(action.stage, kind, action.microbatch) for kind in kinds]
            here = next(found[other] for other in waits if other in wanted)
            reject(table, here, f"{action} is missing on rank {rank}", rows)
    for action, others in waits.items():
        rank, position = found[action]
        for other in others:
            if found[other][0] == rank and found[other][1] > position:
                reject(table, (rank, position), f"{action} comes before {other}, which it needs", rows)
    _check_pairs(table, rows, found)
    done = set(executable_order(rows, waits))
    for action, cell in found.items():
        if action not in done:
            reject(table, cell, f"{action} waits for something that waits for it", rows)


def _check_pairs(table: Table, rows: Rows, found: Positions) -> None:
    """A rank must receive from each other rank in the order of that one's sends."""
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for action, (rank, _) in found.items():
        target = target_stage(action, table.num_stages)
        if action.kind.is_message and target is not None:
            receive = Action(target, Kind.RECV_F if action.kind.is_forward else Kind.RECV_B, action.microbatch)
            received[rank, found[receive][0]].append(receive)
    for (sender, rank), receives in received.items():
        positions = [found[receive][1] for receive in receives]
        for late, (before, position) in enumerate(pairwise(positions), 1):
            if position < before:
                reason = f"{receives[late]} comes before {receives[late - 1]}, but rank {sender} sends them"
                reject(table, (rank, position), f"{reason} the other way round", rows)


CONTEXT = 6
"""positions drawn before and after the marked one, and ranks above and below it"""
MAX_RANKS = 32
"""up to this many ranks, all are drawn"""


def reject(table: Table, cell: tuple[int, int], reason: str, rows: Rows | None = None) -> NoReturn:
    """Raise a `HanayoError` about the action at `cell`, a rank and a position in its row. Default rows: the table's."""
    drawing = table_text(table.actions if rows is None else rows, cell)
    error = HanayoError(f"schedule {table.name!r}, rank {cell[0]}, position {cell[1]}: {reason}\n{drawing}")
    error.cell = cell
    raise error


def table_text(rows: Rows, mark: tuple[int, int]) -> str:
    """The cells around `mark` (rank, position), a line per rank, the marked one in brackets.

    Example:
        >>> print(table_text(build("1f1b", num_ranks=2, num_microbatches=1).actions, mark=(1, 0)))
        rank 0   0F0   0B0
        rank 1  [1F0]  1B0
    """
    longest = max(map(len, rows), default=0)
    first, last = max(0, mark[1] - CONTEXT), min(longest, mark[1] + CONTEXT + 1)
    ranks = range(len(rows))
    if len(rows) > MAX_RANKS:
        ranks = range(max(0, mark[0] - CONTEXT), min(len(rows), mark[0] + CONTEXT + 1))
    cells = {rank: [str(action) for action in rows[rank][first:last]] for rank in ranks}
    width = max((len(cell) for row in cells.values() for cell in row), default=0)
    lines = []
    for rank, row in cells.items():
        drawn = [
            (f"[{cell}]" if mark == (rank, first + position) else f" {cell} ").ljust(width + 2)
            for position, cell in enumerate(row)
        ]
        head = f"rank {rank}".ljust(len(f"rank {len(rows) - 1}"))
        before, after = "..." if first else "", "..." if last < len(rows[rank]) else ""
        lines.append(f"{head} {before}{' '.join(drawn)}{after}".rstrip())
    return "\n".join(lines)
