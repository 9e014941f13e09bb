"""A chaos run: 200 steps, in which random processes are killed at random moments, end as an undisturbed run does.

undisturbed   0 ......................................................... 200
disturbed     0 ......... 43 X    40 ....... 97 X   95 ................... 200     equal to the last bit
"""

from pathlib import Path

import pytest

from recipes.resume_drill.compare import compare_runs
from recipes.resume_drill.drill import Drill
from recipes.resume_drill.victims import Launcher, plan

SEEDS: list[tuple[int, Launcher]] = [(1, "lightning"), (2, "lightning"), (3, "torchrun"), (4, "torchrun")]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "launcher"), SEEDS)
def test_200_steps_with_random_kills_end_bit_equal_to_the_undisturbed_run(
    tmp_path: Path, seed: int, launcher: Launcher
) -> None:
    kills = plan(seed, 5, 200, 4, launcher)
    Drill(tmp_path / "undisturbed", 200).run()
    events = Drill(tmp_path / "disturbed", 200, kills, launcher).run()
    assert [event.text for event in events if event.kind == "kill"] == [str(kill) for kill in kills]
    assert not [event for event in events if event.kind == "left"]
    found = compare_runs(tmp_path / "undisturbed", tmp_path / "disturbed")
    assert found.different == () and found.num_tensors > 200
