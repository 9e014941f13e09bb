"""The benchmarks' command line prints and writes the findings, and returns an exit code.

findings --> text, --json, --table, --picture --> their code          HanayoError --> 2          ctrl-C --> 130
"""

import argparse
import json
from pathlib import Path

import pytest

from lightning_hanayo.errors import HanayoError
from recipes.benchmarks.harness import Findings, describe, new_parser, numeric, run, whole


def test_requested_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn: list[str] = []
    found = Findings("| a table |\n", {"a": 1}, {what: lambda path: drawn.append(path.name) for what in ("x", "y")}, 1)
    parser = new_parser("nothing", "about", x="draw x", y="draw y")
    names = ["--json", str(tmp_path / "a.json"), "--table", str(tmp_path / "a.md"), "--y", "y.png"]
    assert run(lambda _: found, parser.parse_args(names)) == 1
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert (tmp_path / "a.md").read_text() == found.text and found.text in capsys.readouterr().out
    assert drawn == ["y.png"]
    assert run(lambda _: found, parser.parse_args([])) == 1 and drawn == ["y.png"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(HanayoError("no such thing"), 2, "error: no such thing\n"),
     (KeyboardInterrupt(), 130, "interrupted; all processes have ended\n")],
)  # fmt: skip
def test_errors_are_one_line(error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(_: argparse.Namespace) -> Findings:
        raise error

    assert run(measure, new_parser("nothing", None).parse_args([])) == code
    assert capsys.readouterr() == ("", said)


def test_numbers() -> None:
    assert (whole("3"), numeric("0"), numeric("0.5")) == (3, 0, 0.5)
    for parse, text in ((whole, "0"), (numeric, "-1"), (numeric, "nan")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text}: expected at least"):
            parse(text)


def test_the_machine_is_three_lines() -> None:
    when, software, load = describe("two hosts", "all is well")
    assert "cores" in when and software.endswith("two hosts") and load.startswith("all is well; load average")
