"""Generators go on from their saved states as if nothing had happened since."""

import random

import numpy as np
import pytest
import torch

from lightning_hanayo.pipeline_parallel.rng import generator_states, set_generators

CPU = torch.device("cpu")


def draw() -> list[float]:
    """A number of each generator; those of a normal distribution come in pairs, of which one is kept."""
    return [float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.rand()), np.random.randn()]


@pytest.mark.parametrize("before", range(2))
def test_the_same_numbers_are_drawn_again(before: int) -> None:
    for _ in range(before):
        draw()
    states = generator_states(CPU)
    first = [draw() for _ in range(3)]
    set_generators(states, CPU)
    assert [draw() for _ in range(3)] == first


def test_a_generator_without_a_state_goes_on() -> None:
    states = generator_states(CPU)
    del states["python"]
    before = random.getstate()
    set_generators(states, CPU)
    assert random.getstate() == before
