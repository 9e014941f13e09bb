"""Writes docs/supported/habits.md: what comes of each habit on each kind of layout.

Run `python -m tests.habits.table` after a change of the catalog.
"""

from collections import Counter
from pathlib import Path

from tests.habits.catalog import GROUPS
from tests.habits.habit import LAYOUTS, Habit, Refused

PAGE = Path(__file__).parents[2] / "docs" / "supported" / "habits.md"
INTRODUCTION = """\
# Habits of users' code

What your module's code does, and what comes of it. Each cell is the outcome of a test (`tests/habits`):

- **exact**: the same training as in one process (losses, gradients, weights and what the code reads; 1e-9 in fp64).
- **refused**: an error that names the module or parameter and the way out, at the latest in the first step. The number
  is that of the message, below the tables.
- **depends on micro-batches**: a warning names it, and the training equals that of one process that runs the same
  micro-batches.

*pipeline* is P = 2 with one wave, *waves* P = 2 with two, *cube* (2, 2, 1), *both* P = 2 with a cube of (1, 2, 1).
"""


def page() -> str:
    """The whole page."""
    messages: dict[str, int] = {}
    parts = [f"{INTRODUCTION}\n{_summary()}\n"]
    for title, habits in GROUPS.items():
        header = f"| | {' | '.join(LAYOUTS)} |\n|---|{'---|' * len(LAYOUTS)}"
        parts.append(f"## {title}\n\n{header}\n" + "\n".join(_row(habit, messages) for habit in habits) + "\n")
    if messages:
        lines = [f"{number}. {text}" for text, number in messages.items()]
        parts.append("## Messages\n\nThe key words of each error:\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _summary() -> str:
    """How many cells have which outcome."""
    habits = [habit for group in GROUPS.values() for habit in group]
    cells = Counter(str(outcome) for habit in habits for outcome in habit.outcomes.values())
    counts = ", ".join(f"{number} {name.replace('depends', 'depend')}" for name, number in cells.most_common())
    return f"{len(habits)} habits on {len(LAYOUTS)} layouts are {cells.total()} cells: {counts}."


def _row(habit: Habit, messages: dict[str, int]) -> str:
    cells = []
    for name in LAYOUTS:
        outcome = habit.outcomes[name]
        cell = str(outcome)
        if isinstance(outcome, Refused):
            cell += f" ({messages.setdefault(outcome.shown or outcome.message, len(messages) + 1)})"
        cells.append(cell)
    return f"| {habit.name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
