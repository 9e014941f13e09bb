"""An uncaught error shows the user's frames; those of the engine are hidden, unless no user code was called."""

import sys
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException

import lightning
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

import lightning_hanayo
from lightning_hanayo import HanayoStrategy, tracebacks
from lightning_hanayo.errors import HanayoError

FILES = {
    name: str(Path(str(package.__file__)).with_name(f"{name}.py"))
    for name, package in {"engine": lightning_hanayo, "lightning": lightning, "torch": torch}.items()
}


def frames_shown(*names: str, is_mistake: bool = False) -> tuple[list[str], str]:
    """The names of the frames that are shown of these, outermost first, and the text."""
    report = TracebackException.from_exception(KeyError("missing"))
    frames = [FrameSummary(FILES.get(name, f"/home/me/{name}.py"), 1, name, line="code") for name in names]
    report.stack = StackSummary.from_list(frames)
    text = tracebacks.shown(report, is_mistake=is_mistake)
    return [frame.name for frame in report.stack], text


def test_the_users_frames_and_the_last_one_are_shown() -> None:
    names, text = frames_shown("train", "lightning", "engine", "torch", "step", "torch", "engine", "torch")
    assert names == ["train", "step", "torch"]
    assert text.endswith("KeyError: 'missing'\n(5 frames of the engine are hidden; HANAYO_DEBUG=1 shows them)\n")


def test_a_mistake_is_the_users_line_and_the_message() -> None:
    names, text = frames_shown("train", "lightning", "engine", is_mistake=True)
    assert names == ["train"] and text.endswith("KeyError: 'missing'\n")


def test_an_error_of_this_package_stays_whole() -> None:
    names, text = frames_shown("train", "lightning", "engine", "torch")
    assert names == ["train", "lightning", "engine", "torch"] and "hidden" not in text


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the former hook was given."""
    given: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: given.append(error))
    monkeypatch.delenv("HANAYO_DEBUG", raising=False)
    tracebacks.install()
    return given


def uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def mistake() -> HanayoError:
    with pytest.raises(HanayoError) as caught:
        HanayoStrategy(num_waves=-1)
    return caught.value


def test_errors_elsewhere_are_shown_as_before(before: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    errors = [KeyError("elsewhere"), KeyboardInterrupt()]
    for error in errors:
        uncaught(error)
    assert before == errors and not capsys.readouterr().err


def test_ranks_that_find_the_same_mistake_before_the_launch_are_silent(
    before: list[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, said in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        uncaught(mistake())
        assert capsys.readouterr().err.count("HanayoError: num_waves=-1") == said
    assert not before


def test_a_variable_shows_all(before: list[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANAYO_DEBUG", "1")
    uncaught(mistake())
    assert len(before) == 1


def test_a_missing_gpu_names_the_doctor() -> None:
    """Lightning's own message, which says neither why nor how to find out."""
    with pytest.raises(MisconfigurationException) as caught:
        lightning.Trainer(accelerator="mps", logger=False)
    tracebacks.name_doctor(caught.value)
    assert caught.value.__notes__ == ["`hanayo doctor` shows the build of torch and the devices that it finds."]
