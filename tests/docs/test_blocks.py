"""Every Python block and every command of the pages runs as it stands there, alone; `blocks.py` has the exceptions.

A block starts in an empty folder, with `recipes` in it as in a checkout.
"""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_hanayo import cli
from lightning_hanayo.schedule import registry
from tests.docs.blocks import Block, blocks_of
from tests.harness.launch import launch
from tests.test_words import ROOT, documents

IN_PROCESS = ("schedule", "plan", "init", "ckpt")
"""Subcommands of `hanayo` that start no process."""


def cases() -> list[Any]:
    found = [block for page in documents() for block in blocks_of(page)]
    return [
        pytest.param(
            block,
            id=f"{block.page.relative_to(ROOT).as_posix()}:{block.line}",
            marks=[pytest.mark.thorough] if block.is_thorough else [],
        )
        for block in found
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the recipes. Modules that a block writes, and schedules that it registers, are forgotten."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:.*tensorboardX:UserWarning")  # Lightning's, about what is installed
@pytest.mark.parametrize("block", cases())
def test_a_block_runs(block: Block, folder: Path) -> None:
    if "not run" in block.comments:
        pytest.skip(block.comments["not run"])
    run_block(block, folder, {"__name__": "block"})


def run_block(block: Block, folder: Path, names: dict[str, object]) -> None:
    if block.first is not None:
        run_block(block.first, folder, names)
    if block.language == "python":
        run_python(block, folder, names)
    else:
        assert block.commands, "no command, or no prompt ($) in a console block"
        for command in block.commands:
            shorter = block.comments.get("with", "") if command.startswith("hanayo fit") else ""
            run_command(f"{command} {shorter}", int(block.comments.get("exits", 0)), folder)


def run_python(block: Block, folder: Path, names: dict[str, object]) -> None:
    before = block.comments.get("before", "")
    if "file" in block.comments:
        (folder / block.comments["file"]).write_text(block.code)
        return
    if "script" in block.comments:
        (folder / "block.py").write_text(f"{before}\n{block.code}")
        return run_processes("block.py", folder=folder)
    exec(compile(before, "before", "exec"), names)
    exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)


def run_command(command: str, code: int, folder: Path) -> None:
    program, *arguments = shlex.split(command)
    if program == "hanayo" and arguments[0] in IN_PROCESS:
        assert cli.run(arguments) == code, command
    elif program == "hanayo":
        run_processes("-m", "lightning_hanayo", *arguments, folder=folder, code=code)
    elif program == "torchrun":
        run_processes("-m", "torch.distributed.run", *arguments, folder=folder, code=code)
    elif program in ("python", "python3"):
        run_processes(*arguments, folder=folder, code=code)
    else:
        pytest.fail(f"{command}: mark what can't run here (<!-- not run: why -->)")


def run_processes(*arguments: str, folder: Path, code: int = 0) -> None:
    ended = launch(folder, *arguments, timeout=350)
    assert ended.code == code, ended.output
    assert not ended.leftover
