"""The report of a run in which nothing moves, as text: who waits for whom, and what those do who wait for nobody.

No progress for 15 s in step 12 (training).
  rank 2 (pipeline 1, data 0) waits for nobody: it is in on_train_batch_start, model.py:31: time.sleep(3600)
  rank 0 (pipeline 0, data 0) waits for rank 2: the activation of stage 1, micro-batch 3
  ranks 4 to 127 wait for rank 2
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

from lightning_hanayo.monitor.hangs.waits import Standstill

MAX_LINES = 12
"""of a report"""
_MAX_BLAMED = 4
_PLURAL = {"waits": "wait", "is": "are", "does": "do", "has": "have"}
_PlaceOf = Callable[[int], str]


def report(standstill: Standstill, place: _PlaceOf, sources: Mapping[int, str] | None = None) -> list[str]:
    """The lines of the report, without the first and the last, which say how long it lasts, and what follows.

    Args:
        standstill: what all ranks do.
        place: where a rank is in the layout, as "pipeline 1, data 0".
        sources: the source lines of ranks that wait for nobody.
    """
    blamed = standstill.to_blame
    lines = _blamed(standstill, place, sources or {})
    waiting = [rank for rank in sorted(standstill.statuses) if rank not in blamed]
    return lines + _waiting(standstill, waiting, place, MAX_LINES - 2 - len(lines))


def named(ranks: Iterable[int]) -> str:
    """Ranks in words.

    Example:
        >>> named([4, 5, 6, 9])
        'ranks 4 to 6 and 9'
    """
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    starts = [i for i, rank in enumerate(ordered) if i == 0 or rank != ordered[i - 1] + 1]
    parts = [_part(ordered[start:end]) for start, end in pairwise([*starts, len(ordered)])]
    flat = [one for part in parts for one in part]
    return f"ranks {', '.join(flat[:-1])} and {flat[-1]}" if len(flat) > 1 else f"ranks {flat[0]}"


def _part(ranks: list[int]) -> list[str]:
    return [f"{ranks[0]} to {ranks[-1]}"] if len(ranks) > 2 else [str(rank) for rank in ranks]


def summary(standstill: Standstill, place: _PlaceOf, sources: Mapping[int, str] | None = None) -> str:
    """One line about the ranks that hold the others up."""
    return "; ".join(line.strip() for line in _blamed(standstill, place, sources or {}))


def _blamed(standstill: Standstill, place: _PlaceOf, sources: Mapping[int, str]) -> list[str]:
    blamed = standstill.to_blame
    if not standstill.idle:
        return _grouped(standstill, blamed, place)
    lines = _merged([(rank, _idle(standstill, rank, sources)) for rank in blamed], place)
    more = len(lines) - _MAX_BLAMED
    return lines if more <= 1 else [*lines[:_MAX_BLAMED], f"  and {more} more like them"]


def _idle(standstill: Standstill, rank: int, sources: Mapping[int, str]) -> str:
    source = f": {sources[rank]}" if sources.get(rank) else ""
    if rank in standstill.absent:
        return standstill.absent[rank] + source
    status = standstill.statuses[rank]
    others = any(rank in standstill.waits_for(other) for other in standstill.statuses)
    return f"{'waits for nobody: it ' if others else ''}{status.doing}{source}"


def _waiting(standstill: Standstill, ranks: list[int], place: _PlaceOf, most: int) -> list[str]:
    """What the others wait for; of large worlds without the messages, or in one line."""
    lines = _grouped(standstill, ranks, place)
    if len(lines) <= most:
        return lines
    lines = _merged([(rank, f"waits for {named(standstill.waits_for(rank))}") for rank in ranks], place)
    return lines if len(lines) <= most else [f"  {named(ranks)} wait for those, or for others that do"]


def _grouped(standstill: Standstill, ranks: list[int], place: _PlaceOf) -> list[str]:
    """A line for all ranks that wait for the same thing."""
    return _merged([(rank, _wait(standstill, rank)) for rank in ranks], place)


def _wait(standstill: Standstill, rank: int) -> str:
    wait = standstill.statuses[rank].wait
    assert wait is not None
    if others := standstill.waits_for(rank):
        return f"waits for {named(others)}: {wait.what}"
    return f"is in a collective with all its ranks, which hasn't ended: {wait.what}"


def _merged(texts: list[tuple[int, str]], place: _PlaceOf) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, text in texts:
        by_text.setdefault(text, []).append(rank)
    return [
        f"  {named(ranks)} ({place(ranks[0])}) {text}" if len(ranks) == 1 else f"  {named(ranks)} {_plural(text)}"
        for text, ranks in by_text.items()
    ]


def _plural(text: str) -> str:
    verb, _, rest = text.partition(" ")
    return f"{_PLURAL[verb]} {rest}".replace(": it is ", ": they are ", 1)
