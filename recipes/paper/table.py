"""Table: rows as Markdown."""

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left, the others to the right.

    Example:
        >>> print(markdown(("schedule", "bubble"), [("gpipe", "42.9 %")]))
        | schedule | bubble |
        |---|---:|
        | gpipe | 42.9 % |
    """
    line = "|---" + "|---:" * (len(head) - 1) + "|"
    return "\n".join([_row(head), line, *map(_row, rows)])


def percent(value: float, digits: int = 1) -> str:
    """0.4286 as `42.9 %`."""
    return f"{100 * value:.{digits}f} %"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
