"""Shows a verdict: one screen for a terminal, or everything as JSON."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_hanayo.checking.comparison import KINDS, Comparison, Difference, Kind
from lightning_hanayo.checking.verdict import Verdict, changed_value, describe

_PLURALS: Mapping[Kind, str] = {
    "loss": "losses",
    "gradient": "gradients",
    "weight": "weights",
    "buffer": "buffers",
    "log": "logged values",
}
_COLOURS = {"exact": "green", "depends on micro-batches": "yellow"}
_NUM_SHOWN = 4
"""differences that a screen lists"""


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print the summary, the largest differences, the first names that differ, and the likely cause."""
    console.print(Text(verdict.summary, style=f"bold {_COLOURS.get(verdict.outcome, 'red')}"))
    if verdict.layout is not None:
        console.print(_table(verdict.layout, verdict.microbatches))
    differences = _differences(verdict)
    for one in differences[:_NUM_SHOWN]:
        console.print(Text(f"  {describe(one)}"))
    if (more := len(differences) - _NUM_SHOWN) > 0:
        console.print(Text(f"  and {more} more (--json lists them)"))
    for name, option in verdict.options.items():
        console.print(Text(f"  loss_weight={name!r}: {_of_option(option)}"))
    for text in (verdict.cause, *(f"Note: {note.rstrip('.')}." for note in verdict.notes), verdict.trace):
        if text:
            console.print(Text(text))


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Everything that the check has found. A gap that can't be measured is null."""
    return {
        "outcome": verdict.outcome,
        "exit_code": verdict.exit_code,
        "summary": verdict.summary,
        "cause": verdict.cause,
        "layout": _comparison_json(verdict.layout),
        "microbatches": _comparison_json(verdict.microbatches),
        "options": {
            name: option if isinstance(option, str) else _comparison_json(option)
            for name, option in verdict.options.items()
        },
        "notes": list(verdict.notes),
        "trace": verdict.trace,
    }


def _table(layout: Comparison, microbatches: Comparison | None) -> Table:
    """The largest relative difference of each kind."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    columns = {"layout and micro-batches": layout}
    if microbatches is not None:
        columns["micro-batches and whole batches"] = microbatches
    table.add_column("largest difference")
    table.add_column("values", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    for kind in KINDS:
        if kind in layout.largest:
            gaps = [_gap(column.largest.get(kind, 0.0)) for column in columns.values()]
            table.add_row(_PLURALS[kind], str(layout.num_values[kind]), *gaps)
    return table


def _differences(verdict: Verdict) -> tuple[Difference, ...]:
    """The differences that the verdict is about; without the first of a layout, which the summary names."""
    if verdict.layout is not None and not verdict.layout.is_exact:
        return verdict.layout.differences[1:]
    return verdict.microbatches.differences if verdict.microbatches is not None else ()


def _of_option(option: Comparison | str) -> str:
    if isinstance(option, str):
        return option
    if option.is_exact:
        return "exact"
    return f"changes {changed_value(option)}{' (the training is exact)' if option.trains_alike else ''}"


def _comparison_json(compared: Comparison | None) -> dict[str, Any] | None:
    if compared is None:
        return None
    return {
        "exact": compared.is_exact,
        "largest": {kind: _finite(gap) for kind, gap in compared.largest.items()},
        "num_values": dict(compared.num_values),
        "differences": [
            one.key._asdict() | {name: _finite(value) for name, value in vars(one).items() if name != "key"}
            for one in compared.differences
        ],
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _gap(value: float) -> str:
    return f"{value:.0e}" if value else "0"
