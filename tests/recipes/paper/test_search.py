"""The search over layouts and waves: closed forms equal simulated schedules, and choices are checked with 8 GPUs."""

import pytest

from lightning_hanayo.schedule import CostModel, build, simulate
from recipes.paper import ranks, search
from recipes.paper.clusters import WAVES, fit_all

MESSAGES = {one.cluster: one.message for one in fit_all(WAVES)}
PCIE = MESSAGES["A100, PCIe, two per node"]


@pytest.mark.parametrize(("num_ranks", "num_waves"), [(4, 8), (8, 2), (16, 2), (32, 1)])
def test_a_layouts_step_is_the_simulated_one(num_ranks: int, num_waves: int) -> None:
    share = 8 / num_ranks
    schedule = build("hanayo", num_ranks=num_ranks, num_microbatches=num_ranks, num_waves=num_waves)
    timeline = simulate(schedule, CostModel(share, share, share, PCIE))
    assert search.makespan(num_ranks, num_waves, PCIE) == pytest.approx(timeline.makespan)


def test_layouts_have_no_more_stages_than_the_papers_pipelines() -> None:
    assert {p: search.waves_for(p)[-1] for p in search.LAYOUTS} == {4: 8, 8: 8, 16: 4, 32: 2}


def test_slower_messages_ask_for_fewer_waves() -> None:
    assert [search.best(num_ranks, PCIE) for num_ranks in search.LAYOUTS] == [4, 2, 2, 1]
    for message in MESSAGES.values():
        fastest = [search.makespan(p, search.best(p, message), message) for p in search.LAYOUTS]
        assert fastest == sorted(fastest)


def test_a_reduction_that_nothing_hides_must_be_long_before_shorter_pipelines_lose() -> None:
    lead = search.makespan(8, 2, PCIE) - search.makespan(4, 4, PCIE)
    reductions = [2 * (degree - 1) / degree * 8 / num_ranks for num_ranks, degree in ((4, 8), (8, 4))]
    assert reductions == [3.5, 1.5]
    assert lead / (reductions[0] - reductions[1]) == pytest.approx(2.7, abs=0.05)


def test_six_of_eight_choices_are_the_fastest_measured() -> None:
    losses = [search.choice(one, row)[2] for one in fit_all(WAVES) for row in one.rows]
    assert sorted(losses)[:6] == [0] * 6
    assert sorted(losses)[6:] == pytest.approx([0.014, 0.018], abs=0.0005)


def test_at_b_equal_p_all_schemes_fill_one_rank_and_gpipe_alone_grows() -> None:
    for scheme in ranks.SCHEMES:
        assert max(scheme.activations()) == ranks.NUM_RANKS
        grows = max(scheme.activations(16)) > ranks.NUM_RANKS
        assert grows == (scheme.label == "GPipe")
    sums = {scheme.label: sum(scheme.activations()) for scheme in ranks.SCHEMES}
    assert (sums["Hanayo W=1"], sums["Hanayo W=8"]) == (50, 62.25)


def test_chimera_wave_holds_what_chimera_holds() -> None:
    wave = simulate(build("hanayo", num_ranks=4, num_microbatches=4)).peak_activations
    (chimera,) = (scheme.activations() for scheme in ranks.SCHEMES if scheme.label == "Chimera")
    assert sorted([2 * one for one in wave] * 2) == sorted(chimera)


def test_the_papers_variance_is_between_four_and_eight_waves() -> None:
    four, eight = (ranks.fitted(ranks.peaks("hanayo", waves)) for waves in (4, 8))
    assert eight < ranks.VARIANCE["Hanayo"] < four
    chimera = ranks.variance_of(ranks.peaks("chimera")) / ranks.variance_of(ranks.peaks("1f1b"))
    assert chimera * ranks.VARIANCE["DAPPLE"] == pytest.approx(4.01, abs=0.005)
