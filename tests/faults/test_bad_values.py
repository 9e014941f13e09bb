"""Whatever value an option has, it is accepted, or refused in one line by name; and so is the checkpoint to start from.

Hypothesis draws wild values: none may raise another error, or take long.
"""

import subprocess
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hanayo import HanayoStrategy, cli
from lightning_hanayo.checking import check
from lightning_hanayo.errors import CheckpointError, HanayoError
from lightning_hanayo.strategy.options import Options
from tests.harness import models
from tests.harness.training import make_loader

NUMBERS = (0, 1, 2, -1, True, 1.5, 2.0, 1e10, 10**6, 10**10, 10**400, 1e-320, nan, inf, np.int64(2), np.float32(0))
TEXTS = ("", "auto", "time", "samples", "hanayo", "2", "nan", "x" * 10_000, "\0", "a\nb", "nowhere.csv", b"auto")
OTHERS = (None, (), [], {}, set(), (2, 2), (1, 2, 1), [nan], ["a"], [[1]], {"forward": "a"}, {1: 2}, np.ones(3))
CLASSES = (object(), torch.ones(3), timedelta(0), timedelta.max, timedelta(seconds=1), Path("nowhere"), int, len, 1j)
WILD = strategies.sampled_from([*NUMBERS, *TEXTS, *OTHERS, *CLASSES])
NAMES = strategies.sampled_from([field.name for field in fields(Options)])


@given(strategies.dictionaries(NAMES, WILD, max_size=3))
@example({"num_microbatches": 10**400})
@settings(max_examples=150)
def test_any_value_of_an_option_is_accepted_or_refused(options: dict[str, Any]) -> None:
    try:
        HanayoStrategy(**options)
    except HanayoError as error:
        assert any(name in str(error) for name in (*options, "CostModel", "is no profile", "can't be read"))


def one_by_one() -> Iterator[tuple[str, Any]]:
    return ((field.name, value) for field in fields(Options) for value in (*NUMBERS, *TEXTS, *OTHERS, *CLASSES))


def test_each_option_with_each_value_alone() -> None:
    for name, value in one_by_one():
        try:
            HanayoStrategy(**{name: value})
        except HanayoError:
            continue
        except Exception as error:
            pytest.fail(f"{name}={value!r}: {error!r}")


COUNTS = strategies.sampled_from(["1", "2", "3", "0", "-1", "1e10", "10000000000", "1000000", "two", "", "nan", "auto"])
TIMES = strategies.sampled_from(["0", "1", "1,2", "nan", "inf", "-1", "1e300", "1e-300", "1e59", ",", "a"])
FLAGS = strategies.one_of(
    strategies.tuples(strategies.sampled_from(["-P", "-B", "-W", "-V", "--steps", "--ranks-per-node"]), COUNTS),
    strategies.tuples(strategies.sampled_from(["--forward", "--message", "--message-between-nodes"]), TIMES),
    strategies.tuples(strategies.just("--activation-budget"), TIMES),
    strategies.tuples(strategies.sampled_from(["--costs", "--follow", "--columns", "--unit"]), COUNTS),
)
SCHEDULES = strategies.sampled_from(["hanayo", "hanayo-zb", "v-half", "1f1b", "interleaved", "auto", "x", "x.csv"])


@given(strategies.sampled_from(["show", "compare", "check", "export"]), SCHEDULES, strategies.lists(FLAGS, max_size=4))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_arguments_of_a_schedule_are_answered_or_refused(
    capsys: pytest.CaptureFixture[str], subcommand: str, schedule: str, flags: list[tuple[str, str]]
) -> None:
    arguments = [one for flag in flags for one in flag]
    try:
        code = cli.run(["schedule", subcommand, schedule, *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    errors = capsys.readouterr().err.strip()
    assert code in (0, 2)
    assert (code == 2) == errors.startswith("hanayo: error: ")
    assert len(errors.splitlines()) == (code == 2)


# the checkpoint to start from


def _empty(folder: Path) -> Path:
    (folder / "a.ckpt").touch()
    return folder / "a.ckpt"


def _garbage(folder: Path) -> Path:
    (folder / "a.ckpt").write_bytes(b"garbage")
    return folder / "a.ckpt"


def _misspelt(folder: Path) -> Path:
    (folder / "epoch=3.ckpt").touch()
    return folder / "epoch=4.ckpt"


STARTS = {
    "nothing there": (lambda folder: str(folder / "a.ckpt"), "a.ckpt: there is no such file or folder"),
    "no folder": (lambda folder: folder / "b" / "a.ckpt", "nor a folder"),
    "another name": (_misspelt, "did you mean 'epoch=3.ckpt'?"),
    "a folder": (lambda folder: folder, "has no manifest.json"),
    "an empty file": (_empty, "is empty"),
    "another file": (_garbage, "is not in torch's format"),
    "no name": (lambda folder: "", "ckpt_path='': expected the path of a checkpoint, 'last', 'best' or None"),
    "a number": (lambda folder: 5, "ckpt_path=5: expected the path"),
    "the best of none": (lambda folder: "best", "ckpt_path='best': no ModelCheckpoint"),
}


@pytest.mark.parametrize("case", STARTS)
@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_a_checkpoint_to_start_from_is_checked_before_processes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, run: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: pytest.fail(f"{arguments} was started"))
    get_path, message = STARTS[case]
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="hanayo", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(tmp_path / "saved")], max_steps=1,
    )  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        getattr(trainer, run)(models.MLP(), make_loader(models.vectors((8,))), ckpt_path=get_path(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["accumulate_grad_batches", "val_check_interval"])
def test_lightning_may_not_divide_by_zero(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: pytest.fail(f"{arguments} was started"))
    trainer = Trainer(accelerator="cpu", devices=2, strategy="hanayo", logger=False, max_steps=1, **{name: 0})
    with pytest.raises(HanayoError, match=f"Trainer\\({name}=0\\): expected a number above 0"):
        trainer.fit(models.MLP(), make_loader(models.vectors((8,))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 10**12}, "the check needs 1000000000000 batches"),
        ({"depth": -1}, "depth=-1: expected a whole number of at least 1"),
        ({"timeout": nan}, "timeout=nan: expected a number of seconds above 0"),
    ],
)
def test_a_check_refuses_what_it_can_not_do(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HanayoError, match=message):
        check(models.MLP(), make_loader(models.vectors((8,))), devices=2, **arguments)
