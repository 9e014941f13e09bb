"""An exception on any rank ends all ranks within 10 s, shows its cause once, and leaves no process behind.

P = 3:               rank 0   1   2*              * fails; rank 0 has started the others
P = 2, D = 2:        rank 0   1
                          2*  3*

The pool tests what the ranks do after a fault, for several sites and sizes. What the launching process does about its
children needs real launches, which take seconds each.
"""

from pathlib import Path

import pytest

from tests.faults import caught, script
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
    pytest.param(3, "asleep", 2, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("sizes", "site", "rank"), SITES)
def test_the_other_ranks_end_with_peer_failed(pool: Pool, sizes: tuple[int, int], site: str, rank: int) -> None:
    pipe, data = sizes
    with pytest.raises(RunFailed) as caught:
        pool.run(pipe * data, script.train, pipe, data, script.Fault(site, str(rank)), timeout=30.0)
    assert (caught.value.first.rank, caught.value.first.message) == (rank, f"the planned fault on rank {rank}")
    kinds = {failure.rank: failure.kind for failure in caught.value.failures}
    assert kinds == dict.fromkeys(range(pipe * data), "PeerFailed") | {rank: "RuntimeError"}


def test_a_rank_that_leaves_by_sys_exit_is_named_and_keeps_its_code(pool: Pool) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(2, script.train, 2, 1, script.Fault("hook", "1", "leave"), timeout=30.0)
    said = "rank 1 (pipeline 1) left the run: SystemExit(3)"
    assert {one.rank: (one.kind, one.message) for one in caught.value.failures} == {
        0: ("PeerFailed", said),
        1: ("SystemExit", "3"),
    }
    assert "".join(one.output for one in caught.value.failures).count(said) == 1, str(caught.value)


@pytest.mark.parametrize(("pipe", "site", "rank"), LAUNCHES)
def test_a_fault_ends_all_processes_and_its_cause_is_shown_once(
    tmp_path: Path, pipe: int, site: str, rank: int
) -> None:
    ended = launch(tmp_path, SCRIPT, str(pipe), "1", site, str(rank))
    assert ended.num_started == pipe, ended.output
    assert (tmp_path / "fault").exists(), ended.output
    assert ended.code != 0, ended.output
    assert ended.output.count(f"the planned fault on rank {rank}") == 1, ended.output
    assert f"This was on rank {rank} (pipeline {rank})" in ended.output, ended.output
    assert ended.output.count('  File "') <= 5 and "fit_loop.py" not in ended.output, ended.output
    assert not ended.leftover, ended.output
    assert ended.seconds_after_fault <= 10.0, ended.output


@pytest.mark.parametrize(
    ("pipe", "site", "rank", "code", "said"),
    [
        pytest.param(2, "sigterm", 0, 75, "stopped by SIGTERM on rank 0 (pipeline 0)", marks=pytest.mark.thorough),
        pytest.param(3, "sigterm", 2, 75, "stopped by SIGTERM on rank 2 (pipeline 2)", marks=pytest.mark.thorough),
        pytest.param(2, "sigint", 1, 130, "stopped by SIGINT on rank 1 (pipeline 1)", marks=pytest.mark.thorough),
        pytest.param(2, "sigint twice", 1, 130, "(pipeline 1) got SIGINT twice, so", marks=pytest.mark.thorough),
    ],
)
def test_a_signal_to_one_rank_ends_all(tmp_path: Path, pipe: int, site: str, rank: int, code: int, said: str) -> None:
    ended = launch(tmp_path, SCRIPT, str(pipe), "1", site, str(rank))
    assert ended.num_started == pipe and "finished" not in ended.output, ended.output
    assert not ended.leftover and ended.seconds_after_fault <= 10.0, ended.output
    assert "Traceback" not in ended.output, ended.output
    assert (ended.code, ended.output.count(said)) == (code, 1), ended.output


@pytest.mark.thorough  # the main job covers it
def test_a_script_without_a_fault_finishes(tmp_path: Path) -> None:
    ended = launch(tmp_path, SCRIPT, "2", "1", "nowhere", "0")
    assert (ended.code, ended.output.count("finished"), ended.leftover) == (0, 2, []), ended.output


@pytest.mark.thorough  # a launched script shows it the same way
def test_command_line_shows_a_late_error_once(tmp_path: Path) -> None:
    where = "tests.faults.late_errors"
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    strategy = ["--trainer.strategy", "lightning_hanayo.HanayoStrategy", "--trainer.strategy.num_waves", "1"]
    ended = launch(
        tmp_path, "-m", "lightning_hanayo", "fit", f"--model={where}.LateError", f"--data={where}.Data",
        "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_steps=2", *strategy,
        *(f"--trainer.{option}=false" for option in quiet),
    )  # fmt: skip
    assert ended.num_started == 2, ended.output
    assert ended.output.count("a monitor needs a logger") == 1 and "Traceback" not in ended.output, ended.output
    assert (ended.code, ended.leftover) == (2, []), ended.output


@pytest.mark.thorough  # in the pool, tests/habits/after_fit.py
def test_a_script_that_catches_the_error_goes_on_with_all_processes(tmp_path: Path) -> None:
    ended = launch(tmp_path, str(Path(caught.__file__)))
    assert ended.code == 0 and ended.num_started == 2, ended.output
    assert [ended.output.count(f"rank {rank} has trained 2 steps") for rank in range(2)] == [1, 1], ended.output
    assert not ended.leftover, ended.output
