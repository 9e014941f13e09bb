"""Formats rows as a Markdown table."""

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is left-aligned, the others right-aligned.

    Example:
        >>> print(markdown(("schedule", "bubble"), [("gpipe", "42.9 %")]))
        | schedule | bubble |
        |---|---:|
        | gpipe | 42.9 % |
    """
    line = "|---" + "|---:" * (len(head) - 1) + "|"
    return "\n".join([_row(head), line, *map(_row, rows)])


def percent(value: float, digits: int = 1) -> str:
    """Format 0.4286 as `42.9 %`."""
    return f"{100 * value:.{digits}f} %"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
