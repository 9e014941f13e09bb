"""All habits, by the heading under which the table lists them."""

from tests.habits import batches
from tests.habits.habit import Habit

GROUPS: dict[str, list[Habit]] = {
    "How a batch is cut": batches.HABITS,
}
