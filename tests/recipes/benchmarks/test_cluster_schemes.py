"""The schemes of the tensor-parallel benchmark: they compute what dense layers compute, and move what formulas say.

compute 2 s | start 6 | compute 4 s | wait | start 2 | wait         at 2 elements per second

computing   ##    ####
link          ======      ==                2 + 3, but the compute ends later: 6; then 1 more: 7
"""

import pytest
import torch.distributed as dist

from lightning_hanayo.errors import HanayoError
from recipes.benchmarks.cluster import Link
from recipes.benchmarks.schemes.log import Log, replay
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, groups, mesh_of, three_d
from recipes.benchmarks.tensor3d import BYTES, cases, outcome_of, predict, speed_of, text, volume_of
from recipes.benchmarks.tensor3d_rank import Case, Steps, check_all
from tests.harness.pool import Pool

LINK = Link(200)
MESHES = [three_d(sizes) for sizes in ((1, 2, 2), (2, 2, 1), (4, 1, 1), (1, 4, 1))]


def test_a_step_is_replayed() -> None:
    log = Log()
    log.compute(2.0)
    number = log.start(6.0)
    log.compute(4.0)
    log.wait(number)
    log.backward()
    log.wait(log.start(2.0))
    found = replay(log.events, elements_per_second=2.0)
    assert (found.forward, found.step, found.computing, found.receiving) == (6.0, 7.0, 6.0, 4.0)
    assert (found.apart, found.bound) == (10.0, 6.0)


def compare() -> dict[str, float]:
    dist.init_process_group("gloo")
    return check_all(dist.get_rank(), [(name, 4) for name in (*ONE_D, TWO_D, *MESHES)])


@pytest.mark.thorough
def test_all_compute_what_dense_layers_do(pool: Pool) -> None:
    for errors in pool.run(4, compare):
        assert len(errors) == 7 and max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("hosts", [4, 64])
def test_all_move_what_the_formulas_say(hosts: int) -> None:
    side = {4: (2, 2, 1), 64: (4, 4, 4)}[hosts]
    for name in (*ONE_D, TWO_D, three_d(side), three_d((hosts, 1, 1)), three_d((1, 1, hosts)), three_d((1, hosts, 1))):
        case = Case("", hosts, tokens=4096, hidden=64, schemes=(name,), flops_per_second=1e9, batch=64)
        replayed, moved = predict(case, name, LINK)
        assert moved == pytest.approx(volume_of(case, name), rel=1e-12), name
        assert replayed.bound <= replayed.step <= replayed.apart


def test_speed_makes_one_dimension_communicate_most_of_the_time() -> None:
    case = Case("", 8, 128, 16, ONE_D, speed_of(LINK, 128, 16))
    assert case.flops_per_second > 0
    for name in ONE_D:
        found, _ = predict(case, name, LINK)
        assert found.receiving / found.apart == pytest.approx(0.7)


def test_cases_have_the_grids_that_move_least() -> None:
    shapes = cases(LINK, 48, 5, ["shapes"])
    assert [(case.tokens, case.hidden, case.rounds) for case in shapes] == [(384, 48, 5), (96, 48, 3), (256, 32, 3)]
    whole = [name for name in shapes[0].schemes if not name.endswith(" in 4")]
    assert whole == [*ONE_D, "3-d 2,2,2", "3-d 4,2,1", "3-d 8,1,1"]
    assert {"3-d 1,8,1 in 4", "3-d 2,2,2 in 4", "3-d 4,2,1 in 4"} <= set(shapes[0].schemes)
    assert "3-d 2,4,1" in shapes[1].schemes


def test_gains_are_of_the_same_round() -> None:
    """1-D 4, 6; 3-D 1, 2: gains 4 and 3. The last host's time counts."""
    case = Case("shapes", 2, 64, 16, (ONE_D[0], "3-d 2,1,1"), 1e9)
    one, three = Steps([1.0, 1.0], [4.0, 6.0], [100, 100]), Steps([1.0, 1.0], [1.0, 2.0], [50, 50])
    early = Steps([0.5, 0.5], [0.5, 0.5], [50, 50])
    outcome = outcome_of(case, LINK, [dict(zip(case.schemes, (one, three), strict=True)),
                                      dict(zip(case.schemes, (early, early), strict=True))])  # fmt: skip
    assert (outcome.of("3-d 2,1,1").gain, outcome.of(ONE_D[0]).gain) == (3.5, 1.0)
    assert outcome.of(ONE_D[0]).volume == BYTES * volume_of(case, ONE_D[0])
    page = text(["a machine"], [], [outcome], [])
    assert page.count("| 3-d 2,1,1 |") == 1 and "2 layers of 16, 64 tokens (M = 4 h)" in page


def test_names() -> None:
    assert mesh_of(three_d((4, 2, 1))) == (4, 2, 1)
    assert groups(TWO_D, 4) == {"row": [(0, 1), (2, 3)], "column": [(0, 2), (1, 3)]}
    assert groups("3-d 2,1,2", 4)["x"] == [(0, 2), (1, 3)]
    for name, hosts in ((TWO_D, 8), ("3-d 2,2,2", 4), ("4-d", 4)):
        with pytest.raises(HanayoError, match=name):
            groups(name, hosts)
