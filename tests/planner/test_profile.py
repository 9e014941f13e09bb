"""A profile keeps what was measured, and layouts are chosen with it."""

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.files import Profile, costs_from
from lightning_hanayo.planner.layout import COSTS, choose
from lightning_hanayo.schedule import CostModel, simulate, validate

SLOW_END = CostModel((1e-3,) * 7 + (3e-3,), (1e-3,) * 8, (5e-4,) * 8, message=2e-4)
"""eight stages, of which the last also holds the head"""
PROFILE = Profile("hanayo-zb", 2, 2, 4, (1,) * 8, SLOW_END)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert costs_from(str(path)) == costs_from(path) == SLOW_END
    assert len(path.read_text().splitlines()) == 10, "a person reads it too"


GOOD = {"schedule": "x", "num_ranks": 1, "num_waves": 1, "num_microbatches": 1, "blocks": [1], "forward": 1.0,
        "backward_input": 1.0, "backward_weight": 1.0, "message": 0.0}  # fmt: skip
WRONG = [{"num_ranks": inf}, {"num_waves": "two"}, {"blocks": 5}, {"forward": nan}, {"forward": [[1]]}, {"message": -1}]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", "[" * 100_000, '{"forward": 1}', PROFILE.schedule]
    + [json.dumps(GOOD | wrong) for wrong in WRONG],
    ids=lambda text: text[-40:],
)
def test_no_profile(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(HanayoError, match="is no profile: .*expected the profile.json that a run writes"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("nowhere.json", "nowhere.json can't be read: No such file"),
        (3, "costs=3: expected the path of a profile.json"),
        ({"mesage": 1}, "'mesage' is unknown; did you mean 'message'"),
        ({"message": -1}, "a cost is a finite number"),
    ],
)
def test_bad_costs_are_named(given: Any, named: str) -> None:
    with pytest.raises(HanayoError, match=named):
        costs_from(given)


def test_costs_as_a_mapping_or_a_model() -> None:
    assert costs_from({"message": 0.5}) == CostModel(message=0.5)
    assert costs_from(SLOW_END) is SLOW_END
    assert costs_from(None) is None


def test_a_path_that_cant_be_written(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match="can't be written"):
        PROFILE.save(tmp_path / "nowhere" / "profile.json")


# layouts


def chosen(costs: CostModel | None, **options: Any) -> Any:
    return choose(**{"num_ranks": 2, "num_blocks": 32, "num_microbatches": 4, "costs": costs, **options})


def test_the_order_is_optimized_for_the_measured_costs() -> None:
    measured, guessed = (chosen(costs, num_waves=2, schedule="hanayo-zb").table(4) for costs in (SLOW_END, None))
    validate(measured)
    assert simulate(measured, SLOW_END).makespan < simulate(guessed, SLOW_END).makespan


def test_an_order_depends_only_on_the_ratios_of_costs() -> None:
    a, b = (chosen(SLOW_END.scaled(factor), num_waves=2) for factor in (1.0, 1024.0))
    assert a == b
    assert a.predict() == pytest.approx(simulate(a.table(4), SLOW_END).bubble_ratio)


def test_stages_are_added_up_but_never_cut() -> None:
    assert chosen(SLOW_END).num_waves in (1, 2), "4 and 8 waves have more stages than were measured"
    halves = chosen(SLOW_END, num_waves=1).stage_costs
    assert halves.forward == pytest.approx(tuple(4 * t / 10 * 2 for t in (0.5, 0.5, 0.5, 1.0)))
    assert chosen(SLOW_END, schedule="1f1b").predict() > 0
    with pytest.raises(HanayoError) as caught:
        chosen(SLOW_END, num_waves=4)
    said = str(caught.value)
    assert "forward has 8 values, which can't be shared evenly by 16 stages of hanayo" in said
    assert "num_waves=4" in said and "leave costs out" in said


def test_numbers_fit_any_layout() -> None:
    assert chosen(replace(COSTS, message=0.0), num_waves=8).num_stages == 32
    assert chosen(CostModel(forward=2.0, backward_input=2.0, backward_weight=2.0, message=0.1)) == chosen(None)


def test_what_is_no_text_or_too_large_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(HanayoError, match="is no profile: it is no text; expected"):
        Profile.load(path)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(HanayoError, match="is no profile: it has more than 16 MiB"):
        Profile.load(path)
