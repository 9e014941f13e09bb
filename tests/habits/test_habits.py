"""Each habit of the catalog has the outcome that the table in the docs promises."""

from itertools import product

import pytest

from tests.habits.catalog import GROUPS
from tests.habits.habit import EXACT, LAYOUTS, Habit, Refused, check
from tests.habits.table import PAGE, page
from tests.harness.pool import Pool
from tests.harness.thorough import covered

HABITS = [habit for group in GROUPS.values() for habit in group]
# By default every ninth habit runs on one layout, in turn; one on a cube, whose processes take ten times as long.
TURNS = (*("pipeline", "waves") * 12, "pipeline", "cube")
DEFAULT = [(habit, TURNS[index % len(TURNS)]) for index, habit in enumerate(HABITS[::9])]


def _name(value: Habit | str) -> str:
    return value if isinstance(value, str) else value.name.replace("`", "")


@pytest.mark.parametrize(("habit", "layout"), covered(product(HABITS, LAYOUTS), by=DEFAULT), ids=_name)
def test_habit(pool: Pool, habit: Habit, layout: str) -> None:
    check(pool, habit, layout)


def test_habits_that_must_be_exact_are() -> None:
    assert [habit.name for habit in HABITS if habit.always_exact and set(habit.outcomes.values()) != {EXACT}] == []


def test_at_most_a_third_is_refused() -> None:
    outcomes = [outcome for habit in HABITS for outcome in habit.outcomes.values()]
    assert sum(isinstance(outcome, Refused) for outcome in outcomes) <= len(outcomes) / 3


def test_names_are_unique() -> None:
    assert len({habit.name for habit in HABITS}) == len(HABITS)


def test_the_page_shows_the_catalog() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.habits.table"
