"""Grid: a table of actions as text, one row per rank, with one cell marked; what error messages show."""

from collections.abc import Sequence

from lightning_hanayo.schedule.action import Action

AROUND = 6
MANY = 32
"""ranks, of which an error shows all"""


def grid(lists: Sequence[Sequence[Action]], mark: tuple[int, int] | None = None) -> str:
    """The table; with `mark` (rank, place) that cell in brackets and only the places around it; of many ranks, too.

    Example:
        >>> print(grid(build("1f1b", num_ranks=2, num_microbatches=1).actions, mark=(1, 0)))
        rank 0   0F0   0B0
        rank 1  [1F0]  1B0
    """
    longest = max(map(len, lists), default=0)
    ranks = range(len(lists))
    first, last = 0, longest
    if mark is not None:
        first, last = max(0, mark[1] - AROUND), min(longest, mark[1] + AROUND + 1)
        if len(lists) > MANY:
            ranks = range(max(0, mark[0] - AROUND), min(len(lists), mark[0] + AROUND + 1))
    cells = {rank: [str(action) for action in lists[rank][first:last]] for rank in ranks}
    width = max((len(cell) for row in cells.values() for cell in row), default=0)
    lines = []
    for rank, row in cells.items():
        drawn = [
            (f"[{cell}]" if mark == (rank, first + place) else f" {cell} ").ljust(width + 2)
            for place, cell in enumerate(row)
        ]
        head = f"{f'rank {rank}':<{len(f'rank {len(lists) - 1}')}}"
        lines.append(
            f"{head} {'...' if first else ''}{' '.join(drawn)}{'...' if last < len(lists[rank]) else ''}".rstrip()
        )
    return "\n".join(lines)
