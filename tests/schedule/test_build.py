"""`auto`: its choice, and the errors where nothing fits."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import CostModel, build, simulate


def test_costs_of_a_wrong_length_name_one_that_fits() -> None:
    for name in ("auto", "hanayo"):
        with pytest.raises(HanayoError, match=r"forward has 3 values, schedule 'hanayo(-zb)?' 32 stages"):
            build(name, num_ranks=2, num_microbatches=2, num_waves="auto", costs=CostModel(forward=(1.0,) * 3))


def test_costs_that_fit_some_waves_decide_them() -> None:
    costs = CostModel(forward=(0.25,) * 8, backward_input=0.5)
    assert build("hanayo", num_ranks=2, num_microbatches=2, num_waves="auto", costs=costs).num_stages == 8
    with pytest.raises(HanayoError, match="expected at least 1"):
        build("hanayo", num_ranks=2, num_microbatches=2, num_waves="auto", costs=costs, activation_budget=0.5)


def test_steady_prefers_the_schedule_whose_steps_overlap_best() -> None:
    """The order whose single step is shortest lets its second step begin later."""
    sizes = {"num_ranks": 4, "num_microbatches": 8, "num_waves": 2}
    costs = CostModel(message=0.01)
    best = build("auto", costs=costs, steady=True, **sizes)
    others = [build(name, costs=costs, num_ranks=4, num_microbatches=8, **depth) for name, depth in (
        ("hanayo-zb", {"num_waves": 2}), ("interleaved-zb", {"num_stages_per_rank": 4}),
    )]  # fmt: skip
    times = [simulate(one, costs, steps=3).step_times[-1] for one in (best, *others)]
    assert best.name == "hanayo-zb" and times[0] < min(times[1:])
