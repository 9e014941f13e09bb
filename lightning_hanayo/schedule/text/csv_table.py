"""CSV: the table as torch.distributed.pipelining writes and reads it, a row per rank, a cell per action."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action
from lightning_hanayo.schedule.dependency import Lists
from lightning_hanayo.schedule.passes.validation import validate
from lightning_hanayo.schedule.table import Schedule

MAX_BYTES = 64 << 20
MAX_CELLS = 600_000
"""The largest file that is read, checked within half a minute: a table of 600,000 actions, completed of a third."""
_LONGEST_CELL = 64
_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")

Found = Sequence[tuple[Action, int]]
"""Compute actions and the ranks in whose rows they stand."""


def write_csv(path: str | Path, lists: Lists) -> None:
    """Write one row per rank.

    Raises:
        HanayoError: the file can't be written.
    """
    try:
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(lists)
    except OSError as error:
        raise HanayoError(f"{path} can't be written: {error.strerror or error}") from None


def read_csv(path: str | Path) -> Schedule:
    """The schedule in the file (see `Schedule.from_csv`)."""
    path = Path(path)
    rows = [tuple(action for action in row if action.kind.is_compute) for row in read_lists(path)]
    found = [(action, rank) for rank, row in enumerate(rows) for action in row]
    if not found:
        raise HanayoError(f"{path} holds no action; expected a row per rank with cells like 0F0, 3B2")
    stage_ranks = _stage_ranks(path, found)
    schedule = Schedule(
        name=path.stem,
        stage_ranks=stage_ranks,
        actions=tuple(rows),
        num_microbatches=1 + max(action.microbatch or 0 for action, _ in found),
        replica_of=_twins(found, len(stage_ranks)),
    )
    try:
        validate(schedule)
    except HanayoError as error:
        raise _located(path, error, compute_only=True) from None
    return schedule


def check_csv(path: str | Path) -> Schedule:
    """The schedule in the file, its communication held to be complete too, if it has any.

    Raises:
        HanayoError: as `Schedule.from_csv`, or a message is missing, superfluous or misplaced.
    """
    from lightning_hanayo.schedule.passes.completeness import check_communication

    schedule = read_csv(path)
    try:
        check_communication(schedule, read_lists(path))
    except HanayoError as error:
        raise _located(Path(path), error, compute_only=False) from None
    return schedule


def _located(path: Path, error: HanayoError, compute_only: bool) -> HanayoError:
    """The error with its row and cell of the file, where idle cells count too, and those that were dropped."""
    if error.cell is None:
        return HanayoError(f"{path}: {error}")
    rank, place = error.cell
    row = _cells(path)[rank]
    counted = [
        column
        for column, cell in enumerate(row)
        for action in _actions(cell.strip())
        if action.kind.is_compute or not compute_only
    ]
    where = f"cell {counted[place] + 1}" if place < len(counted) else "behind its last cell"
    return HanayoError(f"{path}, row {rank + 1}, {where}: {error}")


def read_lists(path: str | Path) -> Lists:
    """All actions in the file, communication too, one list per row."""
    path = Path(path)
    return [_row(path, rank, cells) for rank, cells in enumerate(_cells(path))]


def _cells(path: Path) -> list[list[str]]:
    """The file's cells as text. Refuses what is too large before it is taken apart."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise HanayoError(f"{path} has more than {MAX_BYTES >> 20} MiB; {_SMALLER}")
        cells = data.count(b",") + data.count(b"\n")
        if cells > MAX_CELLS:
            raise HanayoError(f"{path} has about {cells:,} cells, more than {MAX_CELLS:,}; {_SMALLER}")
        return list(csv.reader(data.decode("utf-8-sig").splitlines()))
    except UnicodeDecodeError as error:
        why = f"it is no text, see byte {error.start}; expected comma-separated cells like 0F0, 3B2"
        raise HanayoError(f"the schedule table {path} can't be read: {why}") from None
    except (OSError, csv.Error) as error:
        raise HanayoError(f"the schedule table {path} can't be read: {error}") from None


_SMALLER = "that is no schedule, or too large a one: write it without communication, or for fewer micro-batches"


def _row(path: Path, rank: int, cells: Sequence[str]) -> tuple[Action, ...]:
    actions: list[Action] = []
    for column, cell in enumerate(cells):
        try:
            actions += _actions(cell.strip())
        except HanayoError as error:
            raise HanayoError(f"{path}, row {rank + 1}, cell {column + 1}: {error}") from None
    return tuple(actions)


def _actions(cell: str) -> Iterator[Action]:
    """What a cell names. torch's own tables also gather and free sharded parameters (dropped here), and have pairs of
    actions that may overlap, `(3F1;2B4)OVERLAP_F_B` (taken one after the other).
    """
    if len(cell) > _LONGEST_CELL:
        cell = f"{cell[:_LONGEST_CELL]}..."
    if not cell or _SHARDING.fullmatch(cell):
        return
    if both := _OVERLAPPED.fullmatch(cell):
        yield from map(Action.parse, both[1].split(";"))
    else:
        yield Action.parse(cell)


def _stage_ranks(path: Path, found: Found) -> tuple[int, ...]:
    """The rank of each stage: the first that has an action of it (validation refuses a second)."""
    ranks: dict[int, int] = {}
    for action, rank in found:
        ranks.setdefault(action.stage, rank)
    missing = next((stage for stage, held in enumerate(sorted(ranks)) if stage != held), None)
    if missing is not None:
        raise HanayoError(f"{path} has stages up to {max(ranks)} but no action of stage {missing}")
    return tuple(ranks[stage] for stage in range(len(ranks)))


def _twins(found: Found, num_stages: int) -> tuple[int, ...]:
    """`replica_of`: two chains where each micro-batch stays in one half of the stages, and both halves have some."""
    half = num_stages // 2
    up: dict[int | None, bool] = {}
    stays = all(up.setdefault(action.microbatch, action.stage >= half) is (action.stage >= half) for action, _ in found)
    if num_stages % 2 or not stays or len(set(up.values())) < 2:
        return ()
    return tuple((stage + half) % num_stages for stage in range(num_stages))
