"""The activation budget: room is kept for micro-batches already under way."""

from lightning_hanayo.schedule.budget import Budget


def test_the_drawing() -> None:
    """Capacity 4, two stages: 0 holds one, 1 holds two; a third micro-batch must leave 0 its last place."""
    budget = Budget(capacity=4, num_stages=2, num_microbatches=3)
    for microbatch in (0, 1, 1):
        assert budget.allows(microbatch)
        budget.take(microbatch)
    assert not budget.allows(2)
    assert budget.allows(0)
    budget.take(0)
    assert not budget.allows(2)
    budget.free(0)
    assert budget.allows(2)


def test_the_oldest_may_always_go_on() -> None:
    budget = Budget(capacity=3, num_stages=3, num_microbatches=2)
    budget.take(0)
    assert not budget.allows(1)
    budget.take(0)
    budget.take(0)
    for _ in range(3):
        budget.free(0)
    assert budget.allows(1)
