"""The time of two actions at once: one device, one link."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.overlap.pair_time import (
    Segment,
    Segments,
    best_order,
    bound,
    run_alone,
    run_pair,
)
from tests.schedule.samples import unhurried

GATHERS = [Segment(start=1.0), Segment(wait=0), Segment(1.0, start=1.0), Segment(wait=1)]
"""gather, compute, scatter: 3 seconds alone, of which it computes for one"""


def actions(random: Random, count: int) -> Segments:
    """Any action of so many collectives, each of which is waited for once."""
    made: list[Segment] = []
    waiting: list[int] = []
    for number in range(count):
        made.append(Segment(random.choice((0.0, 0.5, 1.0)), start=random.choice((0.25, 1.0, 2.0))))
        waiting.append(number)
        while waiting and random.random() < 0.6:
            made.append(Segment(random.choice((0.0, 0.5)), wait=waiting.pop(random.randrange(len(waiting)))))
    return [*made, *(Segment(0.5, wait=number) for number in waiting), Segment(0.5)]


def test_alone_nothing_overlaps_but_what_was_started_before() -> None:
    assert run_alone(GATHERS) == 3.0
    assert run_alone([Segment(start=2.0), Segment(1.5), Segment(wait=0)]) == 2.0


def test_one_computes_while_the_other_waits() -> None:
    """Four collectives of one second each, one after the other, and the computations behind two of them."""
    run = run_pair(GATHERS, GATHERS)
    assert run.seconds == 4.0 and run.ends == (3.0, 4.0)
    assert list(run.order) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_pair_takes_until_the_link_is_free() -> None:
    """Nothing waits for the last sum, but the gathers of what comes next queue up behind it."""
    run = run_pair([Segment(1.0, start=3.0)], [Segment(0.5)])
    assert run.ends == (1.0, 1.5) and run.seconds == run.link_end == 4.0


def test_nothing_to_wait_for_is_one_after_the_other() -> None:
    assert run_pair([Segment(2.0)], [Segment(3.0)]).ends == (2.0, 5.0)


def test_the_preferred_action_gets_the_device_where_the_other_one_starts_a_collective() -> None:
    long = [Segment(1.0, start=0.1), Segment(1.0, start=0.1), Segment(1.0)]
    short = [Segment(start=0.5), Segment(wait=0), Segment(1.0)]
    assert run_pair(long, short).ends == (3.0, 4.5)
    assert run_pair(long, short, prefer=1).ends == (4.0, 2.0)


def test_an_order_is_kept() -> None:
    run = run_pair(GATHERS, GATHERS, [(1, 0), (0, 0), (0, 1), (1, 1)])
    assert run.ends == (4.0, 5.0)
    hangs = run_pair(GATHERS, GATHERS, [(0, 1), (0, 0), (1, 0), (1, 1)])
    assert hangs.seconds == float("inf")


@unhurried
@given(st.integers(0, 10**6))
def test_pairs_are_between_the_bound_and_one_after_the_other(seed: int) -> None:
    random = Random(seed)
    first, second = (actions(random, random.randint(0, 6)) for _ in range(2))
    best = best_order(first, second, tries=60)
    assert bound(first, second) - 1e-9 <= best.seconds <= run_alone(first) + run_alone(second) + 1e-9
    again = run_pair(first, second, best.order, best.prefer)
    assert again.ends == pytest.approx(best.ends)
    assert best_order(first, second, tries=60) == best


def test_an_order_is_found_where_the_first_come_one_is_bad() -> None:
    """The backward's sums fill the link in front of the forward's gathers, and its products the device."""
    forward = [one for number in range(4) for one in (Segment(start=0.5), Segment(wait=number), Segment(0.5))]
    backward = [Segment(1.0, start=0.5) for _ in range(4)]
    assert run_pair(backward, forward).seconds > best_order(backward, forward).seconds
    assert best_order(backward, forward).seconds == pytest.approx(bound(backward, forward), rel=0.09)
