"""Writes what the battery has found as a page: the tables, and each case that did not end as wanted, and why."""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.faults.battery.cases import ours, peers
from tests.faults.battery.runner import Result
from tests.faults.battery.table import markdown, row, rows, strategy_of

TITLES = {"hanayo": "HanayoStrategy", "ddp": "DDPStrategy", "model_parallel": "ModelParallelStrategy"}
_TEXT = """# Faults

Each case is a real training of four processes on CPUs, into which one fault is injected: what, where, and on which
rank. It is judged from outside, by what was printed, the exit code, what is left, and the checkpoints. `tox -e faults`
runs all of them; `python -m tests.faults.battery -k "P=4 kill save"` runs some.

| column | |
|---|---|
| detected | the run ended by itself, or reported that no rank makes progress |
| named | one line names the rank and the cause |
| clean | all ended in time with the [exit code](../guides/faults.md), the cause was printed last; nothing is left |
| lost | the newest checkpoint was damaged or missing, or a signal came and nothing was saved |

In time: within 10 s of the fault; 25 s if a process is stopped; until 15 s after the time-out if it hangs. All limits
are in seconds of an idle machine.
"""


def page(results: Sequence[Result], about: dict[str, Any]) -> str:
    """The whole page."""
    measured = f"Measured on {about['date']}: {about['machine']}. {_share(results)}"
    parts = [_TEXT, measured, *about.get("notes", ()), *_tables(results)]
    return "\n\n".join([*(part.strip() for part in parts), *_open_points(results)]) + "\n"


def _share(results: Sequence[Result]) -> str:
    """How many of the cases were run."""
    done = [result.case.name for result in results if result.verdict.injected]
    every = list(ours()), list(peers())
    ran = [sum(case.name in done for case in cases) for cases in every]
    return f"Of {len(every[0])} cases of ours {ran[0]} were run, of {len(every[1])} of Lightning's {ran[1]}."


def _tables(results: Sequence[Result]) -> Iterator[str]:
    for name, title in TITLES.items():
        own = [result for result in results if strategy_of(result) == name]
        if not own:
            continue
        yield f"## {title}"
        yield markdown("kind", [*rows(own, lambda result: result.case.kind), row("**all**", own)])
        if name == "hanayo":
            yield markdown("site", rows(own, lambda result: result.case.site))


def _open_points(results: Sequence[Result]) -> Iterator[str]:
    """A line for each case of ours that is not as wanted."""
    bad = [result for result in results if strategy_of(result) == "hanayo" and result.verdict.injected]
    bad = [result for result in bad if result.verdict.reasons]
    if bad:
        yield "## What is not as wanted"
        lines = [f"| {result.case.name} | {'; '.join(result.verdict.reasons)} |" for result in bad]
        yield "\n".join(["| case | |", "|---|---|", *lines])
