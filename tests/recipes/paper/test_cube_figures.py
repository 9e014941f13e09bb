"""Modelled steps of the 3-D paper's comparison, and the claims about them in docs/reproduction.md."""

from dataclasses import replace
from itertools import pairwise

import pytest

from recipes.benchmarks.cluster import Link
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, three_d
from recipes.benchmarks.tensor3d import predict
from recipes.benchmarks.tensor3d_rank import Case
from recipes.paper import cube_scaling, cube_share
from recipes.paper.cube_scaling import RULES, efficiency
from recipes.paper.cube_share import TIMES, apart, best_over, cube_over, overlapped, share_for
from recipes.paper.cube_steps import RANKS, Sizes, machine, step, steps, strong
from recipes.paper.printed import CUBE


@pytest.mark.parametrize("name", [ONE_D[0], TWO_D, three_d((4, 2, 2))])
def test_steps_are_the_benchmarks_predictions(name: str) -> None:
    sizes = Sizes(512, 128, 16)
    on = machine(0.7, sizes)
    link = Link(200)
    rate = on.operations / on.elements * link.bytes_per_second / 4
    case = Case("", 16, sizes.tokens, sizes.hidden, (), rate, batch=sizes.sequences)
    unit = on.operations / rate
    predicted, _ = predict(case, name, link)
    found = step(sizes, 16, name, on)
    assert (found.forward, found.step) == pytest.approx((predicted.forward / unit, predicted.step / unit))


def test_the_machine_has_the_share_and_the_unit_that_it_is_asked_for() -> None:
    for share in (0.5, 0.7):
        alone = step(strong(64), 64, ONE_D[0], machine(share))
        assert alone.computing == pytest.approx(1)
        assert alone.receiving / alone.apart == pytest.approx(share)


def test_all_rules_end_in_the_same_step_and_keep_what_they_promise() -> None:
    assert len({rule(64) for rule in RULES.values()}) == 1
    for ranks in RANKS:
        assert RULES["weak, longer batch"](ranks) == Sizes(128 * ranks, 1024, ranks)
        wide = RULES["weak, wider model"](ranks)
        assert wide.hidden % ranks == 0
        assert wide.hidden**2 / ranks == pytest.approx(128**2, rel=0.04)


def test_ranks_do_equal_work_in_all_schemes_and_overlap_some_of_it() -> None:
    one = steps(strong(64), 64, machine())
    assert one.two_d is not None and one.cube is not None
    for replayed in (one.one_d, one.two_d, one.cube, one.best):
        assert replayed.computing == pytest.approx(1)
        assert replayed.bound <= replayed.step <= replayed.apart
    assert efficiency(replace(one.one_d, step=2.0)) == pytest.approx(0.5)


@pytest.mark.thorough
def test_2_d_needs_a_square_and_the_cube_three_equal_sides() -> None:
    squares = [ranks for ranks in RANKS if steps(strong(ranks), ranks, machine()).two_d]
    cubes = [ranks for ranks in RANKS if steps(strong(ranks), ranks, machine()).cube]
    assert (squares, cubes) == ([4, 16, 64], [1, 8, 64])


@pytest.mark.thorough
def test_the_cube_gains_over_1_d_and_is_never_the_best_mesh() -> None:
    for rule in RULES.values():
        modelled = {ranks: steps(rule(ranks), ranks, machine()) for ranks in RANKS}
        gains = [one.one_d.step / one.cube.step for one in modelled.values() if one.cube]
        assert all(before < after for before, after in pairwise(gains))
        assert 1.015 < gains[1] < 1.175
        assert all(one.best.step < one.cube.step for ranks, one in modelled.items() if ranks > 1 and one.cube)
    assert modelled[64].mesh == (16, 4, 1)


def test_the_papers_ratios_and_what_they_need() -> None:
    assert CUBE == {"1-D": 2.32, "2-D": 1.57}
    assert cube_over("1-D", 0.7) == pytest.approx(2.30, abs=0.005)
    assert cube_over("2-D", 0.7) == pytest.approx(0.97, abs=0.005)
    assert cube_over("2-D", 0.7, apart) == pytest.approx(1.23, abs=0.005)
    for time, share in zip(TIMES.values(), (0.705, 0.719), strict=True):
        assert share_for("1-D", time) == pytest.approx(share, abs=0.0006)
        assert cube_over("1-D", share, time) == pytest.approx(2.32, abs=0.01)
    for time, share in ((overlapped, 0.963), (apart, 0.955)):
        assert share_for("2-D", time) == pytest.approx(share, abs=0.001)
        assert cube_over("1-D", share, time) > 4
    assert best_over("2-D", 0.855) > 1.57 > best_over("2-D", 0.845)
    assert best_over("2-D", 0.81, apart) > 1.57 > best_over("2-D", 0.80, apart)
    assert cube_share.slower_messages() == pytest.approx(1.61, abs=0.005)


def test_emulated_hosts_confirm_the_steps() -> None:
    scaling = [ratio for title, _, _, ratio in cube_scaling.measured() if title in ("strong", "weak")]
    assert len(scaling) == 16
    assert min(scaling) > 1
    assert max(scaling) < 1.111
