"""The time of two actions that take turns: one device, one link."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.cost import CostModel, Segment, Segments, run_alone, run_by_turns
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
    run = run_by_turns(GATHERS, GATHERS)
    assert run.length == 4.0 and run.ends == (3.0, 4.0)


def test_a_pair_takes_until_the_link_is_free() -> None:
    """Nothing waits for the last sum, but the gathers of what comes next queue up behind it."""
    run = run_by_turns([Segment(1.0, start=3.0)], [Segment(0.5)])
    assert run.ends == (1.0, 1.5) and run.length == run.link_end == 4.0


def test_nothing_to_wait_for_is_one_after_the_other() -> None:
    assert run_by_turns([Segment(2.0)], [Segment(3.0)]).ends == (2.0, 5.0)


def test_the_device_changes_hands_at_every_wait_and_an_action_holds_it_while_it_waits() -> None:
    """The first one's collective takes until 4; the second one could go on at 2, but the device isn't its own."""
    first = [Segment(start=1.0), Segment(1.0, start=2.0), Segment(wait=1), Segment(1.0)]
    second = [Segment(1.0, start=0.5), Segment(wait=0), Segment(1.0)]
    assert run_by_turns(first, second).ends == (4.0, 5.0)


@unhurried
@given(st.integers(0, 10**6))
def test_device_and_link_never_idle_together(seed: int) -> None:
    """Mostly a pair takes less than one after the other; an unlucky order of the link can make it take more."""
    random = Random(seed)
    both = [actions(random, random.randint(0, 6)) for _ in range(2)]
    compute, link = (sum(one[part] or 0.0 for own in both for one in own) for part in (0, 1))
    assert max(compute, link) - 1e-9 <= run_by_turns(*both).length <= compute + link + 1e-9


@pytest.mark.parametrize(
    "segments",
    [
        (("F", ()),),
        (("W", GATHERS),),
        (("F", GATHERS), ("F", GATHERS)),
        (("F", [Segment(1.0, wait=0)]),),
        (("F", [Segment(1.0, start=1.0), Segment(wait=-1)]),),
    ],
    ids=["no time", "a weight gradient", "twice", "a wait for nothing", "a negative number"],
)
def test_segments_are_refused_that_no_action_has(segments: Any) -> None:
    with pytest.raises(HanayoError, match="expected some that take time and wait for what has started"):
        CostModel(segments=segments)
