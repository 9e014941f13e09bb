"""The activation budget: memory is reserved for micro-batches already under way."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.schedule.search.activation_budget import Budget
from tests.schedule.samples import unhurried


def test_the_drawing() -> None:
    """Capacity 4, two stages: 0 holds one, 1 holds two; a third micro-batch must leave the last one to 0."""
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


def test_the_oldest_micro_batch_can_always_go_on() -> None:
    budget = Budget(capacity=3, num_stages=3, num_microbatches=2)
    budget.take(0)
    assert not budget.allows(1)
    budget.take(0)
    budget.take(0)
    for _ in range(3):
        budget.free(0)
    assert budget.allows(1)


def can_all_end(capacity: int, held: list[int], needed: list[int]) -> bool:
    """The oldest micro-batch runs all its forwards, then frees what it holds, then the next."""
    total = sum(held)
    for mine, more in zip(held, needed, strict=True):
        if total + more > capacity:
            return False
        total -= mine
    return total == 0


@given(st.integers(1, 4), st.integers(0, 6), st.integers(1, 6), st.randoms(use_true_random=False))
@unhurried
def test_every_allowed_forward_leaves_all_micro_batches_able_to_end(
    num_stages: int, spare: int, num_microbatches: int, random: Random
) -> None:
    """Any order of forwards and backwards; the state is safe, so some micro-batch can always go on."""
    capacity = num_stages + spare
    budget = Budget(capacity, num_stages, num_microbatches)
    held, needed = [0] * num_microbatches, [num_stages] * num_microbatches
    while any(held) or any(needed):
        grow = []
        for one in (one for one, more in enumerate(needed) if more):
            now = [have + (m == one) for m, have in enumerate(held)]
            then = [more - (m == one) for m, more in enumerate(needed)]
            fits = sum(now) <= capacity and can_all_end(capacity, now, then)
            assert budget.allows(one) == fits
            grow += [one] * fits
        shrink = [one for one, have in enumerate(held) if have and not needed[one]]
        one = random.choice(grow + shrink)
        if one in grow:
            budget.take(one)
            held[one], needed[one] = held[one] + 1, needed[one] - 1
        else:
            budget.free(one)
            held[one] -= 1
        assert budget.total == sum(held) <= capacity
