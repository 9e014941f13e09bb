"""An exception on any rank ends all of them within 10 s, shows its cause once, and leaves no process behind.

P = 4:               rank 0   1   2   3*          * breaks
P = 2, D = 2:        rank 0   1
                          2*  3*
"""

from pathlib import Path

import pytest

from tests.harness.launching import launch

SCRIPT = str(Path(__file__).with_name("script.py"))
CASES = [  # (pipe, data), where, on which rank
    ((2, 1), "training_step", 0),
    ((2, 1), "loader", 0),
    ((4, 1), "backward", 3),
    ((2, 1), "hook", 1),
    ((2, 2), "optimizer", 3),
    ((2, 2), "asleep", 3),
]


@pytest.mark.parametrize(("sizes", "site", "rank"), CASES)
def test_ends_everywhere_with_its_cause(tmp_path: Path, sizes: tuple[int, int], site: str, rank: int) -> None:
    pipe, data = sizes
    ended = launch(tmp_path, SCRIPT, str(pipe * data), str(pipe), str(data), site, str(rank))
    assert ended.num_started == pipe * data, ended.output
    assert (tmp_path / "fault").exists(), ended.output
    assert ended.code != 0, ended.output
    assert ended.output.count(f"the vase broke on rank {rank}") == 1, ended.output
    assert not ended.leftover, ended.output
    assert ended.seconds_after_fault <= 10.0, ended.output


@pytest.mark.parametrize("rank", [0, 3])
def test_sigterm_to_one_rank_ends_all(tmp_path: Path, rank: int) -> None:
    ended = launch(tmp_path, SCRIPT, "4", "2", "2", "sigterm", str(rank))
    assert ended.num_started == 4 and "finished" not in ended.output, ended.output
    assert not ended.leftover and ended.seconds_after_fault <= 10.0, ended.output
    assert "Traceback" not in ended.output, ended.output


def test_a_sound_script_finishes(tmp_path: Path) -> None:
    ended = launch(tmp_path, SCRIPT, "2", "2", "1", "nowhere", "0")
    assert (ended.code, ended.output.count("finished"), ended.leftover) == (0, 2, []), ended.output


def test_bad_sizes_start_no_process(tmp_path: Path) -> None:
    ended = launch(tmp_path, SCRIPT, "3", "2", "1", "nowhere", "0")
    assert ended.code != 0
    assert ended.num_started == 1, "the launching process itself, and no other"
    assert ended.output.count("doesn't multiply to the 3 processes") == 1, ended.output


def test_unknown_option_on_the_command_line(tmp_path: Path) -> None:
    command = "-m lightning_hanayo fit --model recipes.gpt.module.GPT --data recipes.gpt.data.TextData"
    strategy = "--trainer.strategy lightning_hanayo.HanayoStrategy --trainer.strategy.num_wave 2"
    ended = launch(tmp_path, *command.split(), *strategy.split())
    assert ended.code == 2, ended.output
    assert "num_waves" in ended.output and "Traceback" not in ended.output, ended.output


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
