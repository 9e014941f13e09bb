"""Validation: checks that a table can run: every action once, on its stage's rank, and no deadlock.

The error draws the table as text and marks the wrong action.
"""

from collections import defaultdict
from typing import NoReturn

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.search.evaluator import Evaluator
from lightning_hanayo.schedule.table import Action, Dependencies, Kind, Rows, Table, cell_waits, executable_order

_PAIR_ORDER = (Kind.F, Kind.B, Kind.I)
_WHOLE_BACKWARDS = ({Kind.B}, {Kind.I, Kind.W})


def validate(schedule: Table) -> None:
    """Accept a schedule that can run to its end; one with no backward at all counts as forward only.

    Linear in the number of actions.

    Raises:
        HanayoError: it can't; the message gives the reason, draws the table and marks the wrong action.
    """
    _check_shape(schedule)
    _check_cells(schedule)
    _check_coverage(schedule)
    _check_pairs(schedule)
    _check_order(schedule)


def _check_shape(table: Table) -> None:
    if not table.actions or not table.stage_ranks or table.num_microbatches < 1:
        sizes = f"{table.num_ranks} ranks, {table.num_stages} stages and {table.num_microbatches} micro-batches"
        raise HanayoError(f"schedule {table.name!r} has {sizes}; expected at least one of each")
    for stage, rank in enumerate(table.stage_ranks):
        if rank not in range(table.num_ranks):
            rows = f"but there are rows for {table.num_ranks} ranks ({_span(table.num_ranks)})"
            raise HanayoError(f"schedule {table.name!r}: stage {stage} is on rank {rank}, {rows}")


def _check_cells(table: Table) -> None:
    seen: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(table.actions):
        for position, action in enumerate(row):
            reason = _misplaced(table, rank, action)
            if action in seen and reason is None:
                reason = f"{action} appears twice on rank {rank}, at positions {seen[action][1]} and {position}"
            if reason is not None:
                reject(table, (rank, position), reason)
            seen[action] = (rank, position)
    empty = [rank for rank in range(table.num_ranks) if not table.stages_of(rank)]
    if empty:
        raise HanayoError(f"schedule {table.name!r}: rank {empty[0]} holds no stage; every rank needs at least one")


def _misplaced(table: Table, rank: int, action: Action) -> str | None:
    """Why `action` can't be in the row of `rank`."""
    if not action.kind.is_compute:
        return f"{action} is communication; a schedule holds compute only (F, B, I, W)"
    if action.stage not in range(table.num_stages):
        return f"{action}: there is no stage {action.stage}, stages are {_span(table.num_stages)}"
    if action.microbatch not in range(table.num_microbatches):
        known = f"micro-batches are {_span(table.num_microbatches)}"
        return f"{action}: there is no micro-batch {action.microbatch}, {known}"
    owner = table.stage_ranks[action.stage]
    if owner != rank:
        return f"ranks {owner} and {rank} both claim stage {action.stage}; one rank holds a stage"
    return None


def _check_coverage(table: Table) -> None:
    """Every micro-batch has a forward and, if the table has backwards, a whole backward on each stage."""
    kinds: dict[tuple[int, int | None], dict[Kind, tuple[int, int]]] = defaultdict(dict)
    for rank, row in enumerate(table.actions):
        for position, action in enumerate(row):
            kinds[action.stage, action.microbatch][action.kind] = (rank, position)
    trains = any(kind is not Kind.F for cell in kinds.values() for kind in cell)
    for stage, rank in enumerate(table.stage_ranks):
        for m in range(table.num_microbatches):
            found = kinds[stage, m]
            here = next(iter(found.values()), (rank, len(table.actions[rank])))
            if Kind.F not in found:
                reject(table, here, f"stage {stage} has no forward of micro-batch {m} (expected {stage}F{m})")
            backward = found.keys() - {Kind.F}
            if trains and backward not in _WHOLE_BACKWARDS:
                got = f"got {' and '.join(sorted(backward)) or 'none'}"
                wanted = f"expected {stage}B{m}, or {stage}I{m} and {stage}W{m}"
                reject(table, here, f"stage {stage} has no whole backward of micro-batch {m}: {wanted}, {got}")


def _check_pairs(table: Table) -> None:
    """The actions of a pair are neighbours in this order, of two micro-batches; neither is in another pair."""
    if not table.pairs:
        return
    cells = {action: (rank, position) for rank, row in enumerate(table.actions) for position, action in enumerate(row)}
    seen: set[Action] = set()
    for first, second in sorted(table.pairs, key=lambda pair: cells.get(pair[0], (0, 0))):
        name = f"the pair of {first} and {second}"
        if first not in cells or second not in cells:
            missing = first if first not in cells else second
            raise HanayoError(f"schedule {table.name!r}: {name}: the table has no {missing}")
        rank, position = cells[first]
        if cells[second] != (rank, position + 1):
            reject(table, cells[second], f"{name}: the second one must come right behind the first one, on one rank")
        if first.microbatch == second.microbatch:
            reject(table, cells[second], f"{name}: they are of one micro-batch; two run at once")
        if Kind.W in (first.kind, second.kind):
            reject(table, cells[first], f"{name}: a weight gradient (W) runs alone; pair F, B and I")
        if _PAIR_ORDER.index(first.kind) > _PAIR_ORDER.index(second.kind):
            reject(table, cells[first], f"{name}: F comes before B and I, and B before I, as in {second}, {first}")
        if not seen.isdisjoint((first, second)):
            reject(table, cells[first], f"{name}: one of them is in another pair, too")
        seen |= {first, second}


def _check_order(table: Table) -> None:
    evaluator = Evaluator(table, CostModel())
    if evaluator.run(evaluator.encode(table.actions)) is not None:
        return
    waits = cell_waits(table)
    done = set(executable_order(table.actions, waits))
    stuck: dict[int, int] = {}
    for rank, row in enumerate(table.actions):
        stopped = next((position for position, action in enumerate(row) if action not in done), len(row))
        if stopped < len(row):
            stuck[rank] = stopped
    story, rank = _cycle(table, waits, done, stuck)
    reject(table, (rank, stuck[rank]), f"these wait for each other and can never run: {story}")


def _cycle(table: Table, waits: Dependencies, done: set[Action], stuck: dict[int, int]) -> tuple[str, int]:
    """Which rank waits for which, from one rank round to itself, and that rank. `stuck`: each rank's position."""
    steps: dict[int, str] = {}
    rank = next(iter(stuck))
    while rank not in steps:
        action = table.actions[rank][stuck[rank]]
        missing = next(other for other in waits[action] if other not in done)
        owner = table.stage_ranks[missing.stage]
        blocker = "itself" if owner == rank else table.actions[owner][stuck[owner]]
        where = f"on rank {owner}, " if owner != rank else ""
        steps[rank] = f"rank {rank} at {action} waits for {missing}, which comes {where}after {blocker}"
        rank = owner
    ranks = list(steps)
    return "; ".join(steps[one] for one in ranks[ranks.index(rank) :]), rank


def _span(count: int) -> str:
    return f"0 to {count - 1}"


CONTEXT = 6
"""positions drawn before and after the marked one, and ranks above and below it"""
MAX_RANKS = 32
"""up to this many ranks, all are drawn"""


def reject(table: Table, cell: tuple[int, int], reason: str) -> NoReturn:
    """Raise a `HanayoError` about the action at `cell`, a rank and a position in its row."""
    drawing = table_text(table.actions, cell)
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
