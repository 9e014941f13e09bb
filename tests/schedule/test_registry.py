"""`build`, and schedules that users register."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Request, Schedule, build, register_schedule, registry, schedule_names, simulate
from tests.schedule.samples import NAMES, make, table


def test_the_names() -> None:
    assert set(NAMES) <= set(schedule_names())


def test_a_misspelt_name_gets_a_hint() -> None:
    with pytest.raises(HanayoError, match=r"there is no schedule 'hanyo': did you mean 'hanayo'\?"):
        build("hanyo", num_ranks=2, num_microbatches=2)


@pytest.mark.parametrize("what", ["num_ranks", "num_microbatches", "num_waves", "num_stages_per_rank"])
@pytest.mark.parametrize("size", [0, -1, 1.5, "two"])
def test_sizes_are_whole_numbers_of_at_least_one(what: str, size: object) -> None:
    sizes = {"num_ranks": 2, "num_microbatches": 2} | {what: size}
    with pytest.raises(HanayoError, match=f"{what} must be a whole number of at least 1, got {size!r}"):
        build("interleaved", **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), "4", True, (4,)])
@pytest.mark.parametrize("name", ["gpipe", "hanayo", "auto"])
def test_a_budget_is_a_number_above_zero(name: str, budget: object) -> None:
    with pytest.raises(HanayoError, match="activation_budget=.*, expected a number above 0"):
        build(name, num_ranks=2, num_microbatches=2, activation_budget=budget)  # type: ignore[arg-type]


def test_an_infinite_budget_is_no_limit() -> None:
    for name in ("1f1b", "hanayo", "hanayo-zb"):
        endless = build(name, num_ranks=2, num_microbatches=3, activation_budget=float("inf"))
        assert max(simulate(endless).peak_activations) <= 3


@pytest.mark.parametrize("name", [None, 1, b"hanayo"])
def test_a_name_is_text(name: object) -> None:
    with pytest.raises(HanayoError, match="a schedule's name is text, got .* Known: .*hanayo"):
        build(name, num_ranks=2, num_microbatches=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_is_enough(name: str) -> None:
    for num_microbatches in (1, 3):
        assert make(name, 1, num_microbatches).num_ranks == 1


def test_a_budget_that_a_fixed_order_cannot_keep() -> None:
    assert build("1f1b", num_ranks=4, num_microbatches=8, activation_budget=4)
    with pytest.raises(HanayoError, match="holds 4 M_a of activations on rank 0, more than activation_budget=3"):
        build("1f1b", num_ranks=4, num_microbatches=8, activation_budget=3)


def test_a_user_can_register_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))

    @register_schedule("serial")
    def serial(request: Request) -> Schedule:
        rows = " ".join(f"0F{m} 0B{m}" for m in range(request.num_microbatches))
        return table(rows, stage_ranks=(0,), num_microbatches=request.num_microbatches)

    assert len(build("serial", num_ranks=1, num_microbatches=3).actions[0]) == 6
    with pytest.raises(HanayoError, match="registered already"):
        register_schedule("serial")(serial)


def test_the_table_of_a_faulty_builder_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    register_schedule("broken")(lambda request: table("0F0", "1F0 1B0", stage_ranks=(0, 1), num_microbatches=1))
    with pytest.raises(HanayoError, match="stage 0 has no whole backward"):
        build("broken", num_ranks=2, num_microbatches=1)
