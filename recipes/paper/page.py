"""Formats rows as Markdown tables, and fills the tables of a hand-written page.

prose, prose                                 <- hand-written
<!-- begin bubbles -->
| scheme | printed | ...                     <- the block `bubbles`, replaced whenever the page is filled
<!-- end bubbles -->
prose
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from lightning_hanayo.errors import HanayoError


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


_BLOCK = re.compile(r"(<!-- begin (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end (?P=name) -->)", re.DOTALL)


def blocks_in(page: str) -> dict[str, str]:
    """The blocks of `page`: name -> content."""
    return {match["name"]: match["body"].strip("\n") for match in _BLOCK.finditer(page)}


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """Return `page` with these blocks replaced.

    Raises:
        HanayoError: the page has no such block.

    Example:
        >>> fill("<!-- begin a -->\\nold\\n<!-- end a -->", {"a": "new"})
        '<!-- begin a -->\\nnew\\n<!-- end a -->'
    """
    missing = sorted(set(blocks) - set(blocks_in(page)))
    if missing:
        raise HanayoError(f"the page has no block {missing[0]!r}: expected <!-- begin {missing[0]} --> and its end")

    def replaced(match: re.Match[str]) -> str:
        body = blocks.get(match["name"])
        return match[0] if body is None else f"{match[1]}{body}\n{match[4]}"

    return _BLOCK.sub(replaced, page)
