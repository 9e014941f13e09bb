"""An exception on any rank ends all of them within 10 s, shows its cause once, and leaves no process behind.

P = 3:               rank 0   1   2*              * breaks; rank 0 has started the others
P = 2, D = 2:        rank 0   1
                          2*  3*

What a rank does about a fault is the same wherever it breaks: sites and sizes are played in the pool. What the
launching process does about its children takes real launches, seconds each.
"""

from pathlib import Path

import pytest

from tests.faults import script
from tests.harness.launch import launch
from tests.harness.pool import Pool, RunFailed

SCRIPT = str(Path(script.__file__))
SITES = [  # (pipe, data), where, on which rank
    ((2, 1), "loader", 0),
    ((4, 1), "backward", 3),
    ((2, 1), "hook", 1),
    ((2, 2), "training_step", 2),
    ((2, 2), "optimizer", 3),
]
LAUNCHES = [  # pipe, where, on which rank
    (2, "training_step", 0),
    pytest.param(2, "backward", 1, marks=pytest.mark.thorough),
    (3, "asleep", 2),
]


@pytest.mark.parametrize(("sizes", "site", "rank"), SITES)
def test_the_other_ranks_end_by_themselves(pool: Pool, sizes: tuple[int, int], site: str, rank: int) -> None:
    pipe, data = sizes
    with pytest.raises(RunFailed) as caught:
        pool.run(pipe * data, script.train, pipe, data, script.Fault(site, str(rank)), timeout=30.0)
    assert (caught.value.first.rank, caught.value.first.message) == (rank, f"the vase broke on rank {rank}")
    kinds = {failure.rank: failure.kind for failure in caught.value.failures}
    assert kinds == dict.fromkeys(range(pipe * data), "PeerFailed") | {rank: "RuntimeError"}


@pytest.mark.parametrize(("pipe", "site", "rank"), LAUNCHES)
def test_ends_everywhere_with_its_cause(tmp_path: Path, pipe: int, site: str, rank: int) -> None:
    ended = launch(tmp_path, SCRIPT, str(pipe), "1", site, str(rank))
    assert ended.num_started == pipe, ended.output
    assert (tmp_path / "fault").exists(), ended.output
    assert ended.code != 0, ended.output
    assert ended.output.count(f"the vase broke on rank {rank}") == 1, ended.output
    assert not ended.leftover, ended.output
    assert ended.seconds_after_fault <= 10.0, ended.output


@pytest.mark.parametrize(("pipe", "rank"), [(2, 0), pytest.param(3, 2, marks=pytest.mark.thorough)])
def test_sigterm_to_one_rank_ends_all(tmp_path: Path, pipe: int, rank: int) -> None:
    ended = launch(tmp_path, SCRIPT, str(pipe), "1", "sigterm", str(rank))
    assert ended.num_started == pipe and "finished" not in ended.output, ended.output
    assert not ended.leftover and ended.seconds_after_fault <= 10.0, ended.output
    assert "Traceback" not in ended.output, ended.output


@pytest.mark.thorough  # so does the main job
def test_a_sound_script_finishes(tmp_path: Path) -> None:
    ended = launch(tmp_path, SCRIPT, "2", "1", "nowhere", "0")
    assert (ended.code, ended.output.count("finished"), ended.leftover) == (0, 2, []), ended.output


def test_an_error_that_shows_late_is_said_once_by_the_command_line(tmp_path: Path) -> None:
    where = "tests.faults.late_errors"
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    strategy = ["--trainer.strategy", "lightning_hanayo.HanayoStrategy", "--trainer.strategy.num_waves", "1"]
    ended = launch(
        tmp_path, "-m", "lightning_hanayo", "fit", f"--model={where}.Late", f"--data={where}.Data",
        "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_steps=2", *strategy,
        *(f"--trainer.{option}=false" for option in quiet),
    )  # fmt: skip
    assert ended.num_started == 2, ended.output
    assert ended.output.count("a monitor needs a logger") == 1 and "Traceback" not in ended.output, ended.output
    assert (ended.code, ended.leftover) == (2, []), ended.output
