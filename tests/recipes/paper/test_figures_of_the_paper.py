"""Compares the paper's printed and measured figures with ours: the claims of docs/reproduction.md."""

import pytest

from recipes.paper import bubbles, clusters, ranks, waves
from recipes.paper.clusters import WAVES, fit_all, never_below_four, rms
from recipes.paper.printed import EIGHT_GPUS, SCHEMES, STRONG


def test_bubbles_are_as_printed_and_waves_idle_less() -> None:
    for one in bubbles.bubbles():
        assert one.formula == pytest.approx(one.printed, abs=1.01e-4), one
        if one.scheme.startswith("Hanayo"):
            assert one.simulated < one.formula - 0.008, one
        else:
            assert one.simulated == pytest.approx(one.formula), one


def test_one_message_time_per_cluster_explains_the_waves() -> None:
    fits = fit_all(WAVES)
    assert rms(fits) < 0.011
    assert max(rms([one]) for one in fits) < 0.014
    assert [round(one.message, 3) for one in fits] == [0.027, 0.017, 0.088, 0.017]


def test_chimera_wave_fits_as_four_ranks_but_not_as_two() -> None:
    assert rms(fit_all(SCHEMES)) > 0.03
    assert rms(fit_all(SCHEMES, reading=never_below_four)) < 0.0152
    assert rms(fit_all(SCHEMES, 1.67, never_below_four)) < 0.0134


def test_four_waves_are_below_the_fit_in_every_row() -> None:
    fits = fit_all(WAVES)
    below = [one.residuals(row)["Hanayo W=4"] for one in fits for row in one.rows]
    assert len(below) == len(EIGHT_GPUS)
    assert all(-0.0245 < one < -0.0065 for one in below)


def test_the_minimum_is_found() -> None:
    assert clusters.lowest(lambda x: (x - 0.123) ** 2, 0.0, 1.0) == pytest.approx(0.123, abs=1e-4)


@pytest.mark.parametrize("message", waves.MESSAGES)
def test_the_best_number_of_waves_is_next_to_the_formula(message: float) -> None:
    assert abs(waves.best(message) - waves.formula(message)) < 1


def test_strong_scaling_is_between_overlapping_and_separate_groups() -> None:
    for degree in (2, 4):
        assert clusters.strong(degree, clusters.fitted_message(), 0.0) < STRONG[degree] / 100 < degree
        assert clusters.strong(degree, 0.0, 0.0) == pytest.approx(STRONG[degree] / 100, rel=0.016)


def test_weak_scaling_exposes_little_of_the_reduction() -> None:
    whole = 1.5  # T_F, for R = 1 and D = 4
    message = clusters.fitted_message()
    exposed = clusters.makespan(8, 4, message, 1.0) - clusters.makespan(8, 1, message, 0.0)
    assert 0 < exposed < 0.3 * whole


def test_memory_imbalance_has_the_papers_order() -> None:
    uneven = [
        ranks.variance_of(ranks.peaks(name, num_waves))
        for name, num_waves in (("1f1b", 1), ("hanayo", 2), ("gpipe", 1))
    ]
    assert uneven == sorted(uneven, reverse=True)
    assert uneven[0] == (8**2 - 1) / 12
