"""A configuration file that can't be used is named in one line, with the place of the mistake."""

from pathlib import Path

import pytest

from lightning_hanayo.cli.trainer_start import check_complete, check_config_files
from lightning_hanayo.errors import HanayoError

BAD = {
    "no text": (bytes(range(256)), "a.yaml is no configuration: it is no text"),
    "Latin-1": ("trainer: {} # caf\xe9".encode("latin-1"), "it is no text"),
    "nothing": (b"", "it is empty; expected sections such as trainer, model and data"),
    "a comment alone": (b"# nothing yet\n", "a.yaml is no configuration: it is empty"),
    "a list": (b"- trainer\n- model\n", "it is a list; expected sections"),
    "a number": (b"5", "it is a single value; expected sections"),
    "tabs": (
        b"trainer:\n\tmax_steps: 1\n",
        "line 2, column 1: found character '\\t' that cannot start any token",
    ),
    "an open bracket": (
        b"trainer: {max_steps: 1\n",
        "a.yaml is no configuration: line 2, column 1: expected ',' or '}'",
    ),
    "a key twice": (b"trainer:\n  devices: 1\n  devices: 2\n", "line 3: devices is given twice, first in line 2"),
    "a section twice": (b"trainer: {}\nmodel: a.B\ntrainer: {}\n", "line 3: trainer is given twice, first in line 1"),
    "no options": (b"trainer:\nmodel: a.B\n", "line 1: trainer must be a mapping of its options"),
    "options as a list": (b"trainer: [1]\n", "trainer must be a mapping of its options"),
    "too deep": (b"[" * 1000 + b"]" * 1000, "a.yaml is no configuration: RecursionError"),
    "two documents": (b"a: 1\n---\nb: 2\n", "line 2, column 1: but found another document"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_line(case: str) -> None:
    content, message = BAD[case]
    Path("a.yaml").write_bytes(content)
    with pytest.raises(HanayoError) as caught:
        check_config_files(["--trainer.devices=2", "--config", "a.yaml"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_large_file_is_not_read() -> None:
    with open("a.yaml", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(HanayoError, match="more than 16 MiB"):
        check_config_files(["--config=a.yaml"])


def test_the_same_key_in_two_sections_and_an_anchor_are_fine() -> None:
    Path("a.yaml").write_text("trainer: &t\n  a: 1\nmodel:\n  a: 2\n  <<: *t\ndata: *t\nlist: [{a: 1}, {a: 2}]\n")
    check_config_files(["--config=a.yaml"])


@pytest.mark.parametrize("args", [["--config=nowhere.yaml"], ["--config"], ["--config", "a: 1"], ["--print_config"]])
def test_the_parser_says_what_is_wrong_with_arguments(args: list[str]) -> None:
    check_config_files(args)


def test_a_configuration_that_changes_another_says_so() -> None:
    Path("a.yaml").write_text("model:\n  init_args:\n    width: 8\n")
    Path("c.yaml").write_text("model:\n  class_path: my.Model\n")
    with pytest.raises(HanayoError, match=r"a.yaml sets options of the model.* --config c.yaml --config a.yaml$"):
        check_complete(["--config", "a.yaml"])
    check_complete(["--config=c.yaml", "--config=a.yaml"])
    check_complete(["--config=a.yaml", "--model=my.Model"])
    Path("c.yaml").write_text("model: my.Model\n")
    check_complete(["--config=c.yaml", "--config=a.yaml"])
    Path("c.yaml").unlink()
    with pytest.raises(HanayoError, match=r"--config FILE --config a.yaml$"):
        check_complete(["--config", "a.yaml"])
