"""Long work says in a terminal what it does, and in a pipe nothing."""

import os
import pty
import subprocess
import sys

import pytest

from lightning_hanayo.plotting.terminal_status import showing

COMMAND = [sys.executable, "-m", "lightning_hanayo", "schedule", "compare", "-P", "4", "-B", "8"]


def read(terminal: int) -> str:
    """All that was written to a terminal whose other end is closed."""
    text = b""
    while True:
        try:
            text += os.read(terminal, 1 << 16)
        except OSError:  # EIO: nobody has it open
            return text.decode()


def test_a_terminal_shows_what_a_command_does() -> None:
    terminal, end = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=end, env=environment, text=True) as running:
        os.close(end)
        shown = read(terminal)
        output = running.communicate()[0]
    os.close(terminal)
    assert running.returncode == 0 and "building and simulating" in shown
    assert output.startswith("P = 4") and "building" not in output


def test_a_pipe_gets_nothing() -> None:
    ended = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    assert ended.stderr == ""


def test_the_text_changes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with showing("first") as say:
        say("then")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with showing("first [x]") as say:
        say("then [y]")
    assert "then [y]" in capsys.readouterr().err
