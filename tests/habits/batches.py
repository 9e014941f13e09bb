"""Habits: types of batches, and how they are cut into micro-batches."""

from functools import partial

import torch

from tests.habits.habit import EXACT, Habit, everywhere
from tests.harness import models

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)

HABITS = [
    Habit("a dictionary of tensors", models.MLP, VECTORS, everywhere(EXACT)),
]
