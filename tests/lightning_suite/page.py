"""Writes docs/supported/lightning-suite.md: the table of all runs, and each lost test with the reason."""

from collections.abc import Sequence

from tests.lightning_suite.comparison import Comparison, Reason, reason_for, short_name
from tests.lightning_suite.results import SuiteRun

_INTRODUCTION = """\
# Lightning's own tests

Lightning's tests of `lightning.pytorch`, run with another strategy wherever the Trainer would choose the single CPU
device. A test counts if it passes with the stock strategy. Tests that start processes are left out: those processes
choose a strategy themselves. What fails in a run of all tests may be run again after a correction (`--again`).

To make this page, run `tox -e lightning-suite -- CHECKOUT/tests/tests_pytorch --strategy stock --json stock.json`, the
same for `ddp`, `hanayo`, and `hanayo --microbatches 2`; then
`python -m tests.lightning_suite --compare stock.json ddp.json hanayo1.json hanayo2.json --page FILE`.
"""
_COLUMNS = {
    "stock": "`SingleDeviceStrategy`, as the Trainer chooses it.",
    "ddp": "Lightning's `DDPStrategy`, put in the same way, with one process.",
    "hanayo 1": "`HanayoStrategy` on one rank, with one micro-batch.",
    "hanayo 2": "with two; a batch of one sample, which most tests have, is run twice with half the weight.",
    "engine ran": "tests in which the pipeline's engine ran the steps. The others check arguments, loaders and so on.",
}


def page(comparison: Comparison, reasons: Sequence[Reason]) -> str:
    """The whole page."""
    lines = [_INTRODUCTION, _origin([comparison.stock, *comparison.others]), ""]
    header, *rows = comparison.header(), *comparison.rows()
    lines += [*(f"- **{column}**: {_COLUMNS[column]}" for column in header if column in _COLUMNS), ""]
    lines += [_row(header), "|---" + "|---:" * (len(header) - 1) + "|", *map(_row, rows), ""]
    for run in comparison.others:
        if run.column.startswith("hanayo"):
            lines += _section(comparison, run, reasons)
    return "\n".join(lines)


def _origin(runs: Sequence[SuiteRun]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in runs[0].versions.items())
    dates = sorted({run.date for run in runs})
    return f"Run on {' and '.join(dates)} on {runs[0].machine}, with {versions}."


def _section(comparison: Comparison, run: SuiteRun, reasons: Sequence[Reason]) -> list[str]:
    """The tests that this run loses, by reason."""
    by_reason: dict[str, list[str]] = {}
    for test in comparison.lost(run):
        reason = reason_for(test, run.column, reasons)
        by_reason.setdefault("no reason is known yet" if reason is None else reason.why, []).append(short_name(test))
    count = sum(map(len, by_reason.values()))
    lines = [f"## Lost with {run.column}", "", f"{count} of {len(comparison.counted)} tests.", ""]
    for why, tests in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        lines += [f"- {why} ({len(tests)}):", *(f"  - `{test}`" for test in tests)]
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
