"""CSV: the table as torch.distributed.pipelining writes and reads it, a row per rank, a cell per action."""

import csv
from collections.abc import Sequence
from pathlib import Path

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action
from lightning_hanayo.schedule.dependency import Lists
from lightning_hanayo.schedule.table import Schedule
from lightning_hanayo.schedule.validation import validate


def write_csv(path: str | Path, lists: Lists) -> None:
    """Write one row per rank."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(lists)


def read_csv(path: str | Path) -> Schedule:
    """The schedule in the file (see `Schedule.from_csv`)."""
    path = Path(path)
    try:
        with open(path, newline="") as file:
            cells = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise HanayoError(f"the schedule table {path} can't be read: {error}") from None
    rows = [_row(path, rank, row) for rank, row in enumerate(cells)]
    found = [(action, rank) for rank, row in enumerate(rows) for action in row]
    if not found:
        raise HanayoError(f"{path} holds no action; expected a row per rank with cells like 0F0, 3B2")
    ranks: dict[int, int] = {}
    for action, rank in found:
        ranks.setdefault(action.stage, rank)
    num_stages = max(ranks) + 1
    missing = [stage for stage in range(num_stages) if stage not in ranks]
    if missing:
        raise HanayoError(f"{path} has stages up to {num_stages - 1} but no action of stage {missing[0]}")
    microbatches = [(action.microbatch or 0, action.stage >= num_stages // 2) for action, _ in found]
    schedule = Schedule(
        name=path.stem,
        stage_ranks=tuple(ranks[stage] for stage in range(num_stages)),
        actions=tuple(rows),
        num_microbatches=1 + max(microbatch for microbatch, _ in microbatches),
        replica_of=_twins(num_stages) if num_stages % 2 == 0 and _are_two_chains(microbatches) else (),
    )
    validate(schedule)
    return schedule


def _twins(num_stages: int) -> tuple[int, ...]:
    return tuple((stage + num_stages // 2) % num_stages for stage in range(num_stages))


def _are_two_chains(visits: Sequence[tuple[int, bool]]) -> bool:
    """Whether each micro-batch stays in one half of the stages, and both halves have some."""
    half_of: dict[int, bool] = {}
    same = all(half_of.setdefault(microbatch, half) is half for microbatch, half in visits)
    return same and len(set(half_of.values())) == 2


def _row(path: Path, rank: int, cells: list[str]) -> tuple[Action, ...]:
    actions = []
    for column, cell in enumerate(cells):
        if not cell.strip():
            continue
        try:
            action = Action.parse(cell)
        except HanayoError as error:
            raise HanayoError(f"{path}, row {rank + 1}, cell {column + 1}: {error}") from None
        if action.kind.is_compute:
            actions.append(action)
    return tuple(actions)
