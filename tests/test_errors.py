"""A user's mistake is a `ValueError`; another rank's failure ends this one without a message."""

import doctest
import pickle
import subprocess
import sys

import pytest

from lightning_hanayo import errors
from lightning_hanayo.errors import HanayoError, PeerFailed, UnsupportedError, nearest


@pytest.mark.parametrize("kind", [HanayoError, UnsupportedError])
def test_mistakes_are_value_errors(kind: type[HanayoError]) -> None:
    with pytest.raises(ValueError, match="what to try"):
        raise kind("what to try")


def test_peer_failed_exits_with_1_and_keeps_the_cause() -> None:
    error = PeerFailed("rank 3: out of memory")
    assert isinstance(error, SystemExit) and error.code == 1
    assert str(error) == error.cause == "rank 3: out of memory"


def test_peer_failed_prints_nothing() -> None:
    command = "from lightning_hanayo.errors import PeerFailed; raise PeerFailed('rank 3 did it')"
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("hanyo", "did you mean 'hanayo'? Known: gpipe, 1f1b, hanayo"),
        ("1f1", "did you mean '1f1b'? Known: gpipe, 1f1b, hanayo"),
        ("quite else", "Known: gpipe, 1f1b, hanayo"),
    ],
)
def test_hint_suggests_the_nearest_name(name: str, hint: str) -> None:
    assert nearest(name, iter(["gpipe", "1f1b", "hanayo"])) == hint


def test_errors_can_be_pickled() -> None:
    assert str(pickle.loads(pickle.dumps(UnsupportedError("no")))) == "no"


def test_examples_run() -> None:
    assert doctest.testmod(errors).failed == 0
