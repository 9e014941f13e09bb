"""Writes docs/supported/features.md: what a Lightning user expects, and what comes of it on each layout.

Run `python -m tests.features.table` after a change of the catalog.
"""

from collections import Counter
from datetime import date
from pathlib import Path

import lightning
import torch

from tests.features.catalog import FEATURES, GROUPS
from tests.features.feature import LAYOUTS, ROUNDING, Feature
from tests.habits.habit import Refused

PAGE = Path(__file__).parents[2] / "docs" / "supported" / "features.md"
INTRODUCTION = f"""\
# Features of Lightning

What a user of Lightning expects of a Trainer, and what comes of it with `strategy="hanayo"`. Each cell is the outcome
of a test (`tests/features`): a script runs in one process with the stock strategy, and on the layout, with four
micro-batches. Whatever the script leaves is compared: weights, the loss of each batch, steps and epochs, callback
metrics on all ranks, what the logger got at which step, predictions and results.

- **equal**: names, orders, counts and texts are the same. Numbers differ by {ROUNDING:g} at most (relative to the
  largest of a tensor, or to 1): sums over micro-batches and data ranks are added in another order. In lower precisions
  the table gives the bound.
- **as DDP**: Lightning's DDP on as many data ranks leaves something else than one process does; this is equal to DDP.
- **differs**: in what the note names, and in no more.
- **refused**: an error says what is not supported and what to do. The number is that of the message, below the tables.

*P = 2* is a pipeline of two ranks, *P = 2, D = 2* two of them, which see in each step the samples of the one process.
"""


def page(made: str) -> str:
    """The whole page; `made` says when, and with what."""
    messages: dict[str, int] = {}
    parts = [f"{INTRODUCTION}\n{_summary()}\n{made}\n"]
    for title, features in GROUPS.items():
        layouts = [name for name in LAYOUTS if any(name in feature.outcomes for feature in features)]
        header = f"| | {' | '.join(layouts)} | |\n|---|{'---|' * len(layouts)}---|"
        rows = [_row(feature, layouts, messages) for feature in features]
        parts.append(f"## {title}\n\n{header}\n" + "\n".join(rows) + "\n")
    if messages:
        lines = [f"{number}. {text}" for text, number in messages.items()]
        parts.append("## Messages\n\nThe key words of each error:\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def made_today() -> str:
    """The line of the page that says when, and with what, it was made."""
    return f"Run on {date.today()} with torch {torch.__version__}, lightning {lightning.__version__}, on CPUs."


def _summary() -> str:
    cells = Counter(str(outcome).split(" to ")[0] for feature in FEATURES for outcome in feature.outcomes.values())
    counts = ", ".join(f"{number} {name}" for name, number in cells.most_common())
    return f"{len(FEATURES)} features are {cells.total()} cells: {counts}."


def _row(feature: Feature, layouts: list[str], messages: dict[str, int]) -> str:
    cells = []
    for name in layouts:
        outcome = feature.outcomes.get(name, "")
        cell = str(outcome)
        if isinstance(outcome, Refused):
            cell += f" ({messages.setdefault(outcome.shown or outcome.message, len(messages) + 1)})"
        cells.append(cell)
    return f"| {feature.name} | {' | '.join(cells)} | {feature.note} |"


if __name__ == "__main__":
    PAGE.write_text(page(made_today()), encoding="utf-8")
