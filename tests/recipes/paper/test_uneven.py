"""Slow stages are those of each schedule's own placement, and no schedule is faster than its bound."""

import pytest

from lightning_hanayo.schedule.table import loop, zigzag
from recipes.paper.uneven import CONDITIONS, Condition, Contest, Slow, bound, contest


@pytest.mark.parametrize(
    ("slow", "wave", "in_loop"),
    [
        ("none", [1, 1, 1, 1], [1, 1, 1, 1]),
        ("stage 1", [1, 1.25, 1, 1], [1, 1.25, 1, 1]),
        ("stage P", [1, 1, 1, 1.25], [1.25, 1, 1, 1]),
        ("last stage", [1.25, 1, 1, 1], [1, 1, 1, 1.25]),
        ("rank 0's", [1.3, 1, 1, 1], [1.3, 1, 1, 1]),
    ],
)
def test_how_long_each_rank_works_on_a_micro_batch(slow: Slow, wave: list[float], in_loop: list[float]) -> None:
    for placement, expected in ((zigzag(4, 1), wave), (loop(4, 2), in_loop)):
        times = Condition(2, 0.05, slow).costs(placement).forward
        assert isinstance(times, tuple)
        worked = [sum(t for t, rank in zip(times, placement, strict=True) if rank == one) for one in range(4)]
        assert worked == pytest.approx(expected)


def test_the_bound_is_the_time_before_a_rank_begins_plus_its_work() -> None:
    assert bound(Condition(2, 0.05), 4, 1) == pytest.approx(3 * (0.5 + 0.05) + 24)
    assert bound(Condition(2, 0, "stage P"), 4, 1) == pytest.approx(
        3 * 0.5 + 8 * 3 * 1.25
    )  # stage P is on the last rank


def test_a_loop_wins_where_no_wave_could() -> None:
    found = contest(Condition(2, 0, "stage P"), 4, 1)
    assert found.peer == "interleaved-zb"
    assert (found.theirs, found.bound) == pytest.approx((30.75, 31.5))
    assert found.ours >= found.bound and found.verdict.endswith(" (bound)")


def test_verdicts() -> None:
    assert Contest("zbv", 10.0, 9.0, 8.0).verdict == "0.900"
    assert Contest("zbv", 10.0, 10.5, 10.1).verdict == "1.050 (bound)"
    assert Contest("zbv", 10.0, 10.5, 9.9).verdict == "1.050 (!)"


def test_conditions_have_different_names() -> None:
    assert len({condition.label for condition in CONDITIONS}) == len(CONDITIONS)
