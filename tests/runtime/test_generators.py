"""Generators go on from their saved states as if nothing had happened since."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hanayo.pipeline_parallel.rng import SharedGenerators, generator_states, set_generators

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


def test_states_that_were_shared_before_are_not_sent_again() -> None:
    sent: list[str] = []

    def generators(rank: int) -> SharedGenerators:
        def broadcast(_: str, value: Any = None) -> Any:
            sent.extend([value] if rank == 0 else [])
            return sent[-1]

        relay: Any = SimpleNamespace(transport=SimpleNamespace(rank=rank, num_ranks=2), broadcast=broadcast)
        return SharedGenerators(relay, CPU)

    first, second = generators(0), generators(1)
    drawn = []
    for _ in range(2):
        states = generator_states(CPU)
        first.share()
        draw()  # the second rank draws numbers of its own, and then goes on from the states of the first one
        second.share()
        drawn.append(draw())
        set_generators(states, CPU)
    draw()
    first.share()
    assert drawn[0] == drawn[1] and [bool(text) for text in sent] == [True, False, True]
