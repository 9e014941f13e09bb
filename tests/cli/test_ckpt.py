"""`hanayo ckpt`: what it lists, shows, verifies and removes, its exit codes, and that this needs no torch."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo import cli
from lightning_hanayo.cli.ckpt import SUBCOMMANDS, size
from lightning_hanayo.cli.common import print_table
from lightning_hanayo.dist_checkpointing.state import encode
from lightning_hanayo.dist_checkpointing.target import size_text
from tests.checkpoint.folders import SAVE_ID, write_folder
from tests.harness import limits
from tests.harness.checkpoints import write as write_checkpoint

Captured = pytest.CaptureFixture[str]
LARGE = ["torch", "lightning", "jsonargparse", "wandb", "matplotlib", "rich", "transformers"]
WEIGHTS = {"model/net.0.weight": torch.arange(12.0).reshape(3, 4), "optimizer/0/net.0.weight/step": torch.tensor(3.0)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line: str) -> int:
    """Run one command line and return its exit code."""
    try:
        return cli.run(["ckpt", *line.split()])
    except SystemExit as end:
        return int(end.code or 0)


def printed(line: str, capsys: Captured, code: int = 0) -> Any:
    """The JSON that a command line prints."""
    assert run(f"{line} --json") == code
    return json.loads(capsys.readouterr().out)


def write(path: str = "runs/last.ckpt") -> None:
    """Write a small checkpoint folder."""
    checkpoint = {"callbacks": {"ModelCheckpoint": {"best": 0.5}}, "global_step": 10}
    document, _ = encode({"checkpoint": checkpoint}, "")
    write_folder(path, WEIGHTS, texts={"state": json.dumps(document).encode()})


def write_plain(path: str = "runs/best.ckpt") -> None:
    """Write a small file as Lightning does."""
    Path(path).parent.mkdir(exist_ok=True)
    torch.save(
        {"epoch": 2, "global_step": 1000, "state_dict": {"net.0.weight": torch.arange(12.0).reshape(3, 4)}}, path
    )


def flip(path: str, position: int) -> None:
    """Change one bit of a file."""
    data = bytearray(Path(path).read_bytes())
    data[position] ^= 1
    Path(path).write_bytes(data)


@pytest.mark.parametrize("line", ["--help", *(f"{name} --help" for name in SUBCOMMANDS)])
def test_help_imports_nothing_large(line: str) -> None:
    code = f"""
import sys
from lightning_hanayo.cli import run
try:
    run({["ckpt", *line.split()]!r})
except SystemExit as end:
    assert end.code == 0
print(sorted(set({LARGE}) & set(sys.modules)))
"""
    done = limits.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert "usage: hanayo ckpt" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_listing_showing_verifying_and_removing_import_no_torch() -> None:
    write()
    write_plain()
    code = """
import sys
from lightning_hanayo.cli import run
for command in ("ls", "show runs/last.ckpt", "verify runs/last.ckpt runs/best.ckpt", "rm -y runs/last.ckpt"):
    assert run(["ckpt", *command.split()]) == 0
print([name for name in ("torch", "lightning") if name in sys.modules])
"""
    done = limits.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert [path.name for path in Path("runs").iterdir()] == ["best.ckpt"]


# ls


def test_ls_lists_folders_files_and_leftovers(capsys: Captured) -> None:
    write()
    write_plain()
    write("runs/last.ckpt.tmp-0123abcd")
    Path("runs/notes.txt").write_text("")
    found = printed("ls", capsys)
    listed = {Path(one["path"]).name: (one["kind"], one["step"], one["epoch"]) for one in found}
    assert listed == {
        "best.ckpt": ("file", None, None),
        "last.ckpt": ("folder", 10, 1),
        "last.ckpt.tmp-0123abcd": ("leftover", None, None),
    }
    assert run("ls runs") == 0
    assert "pipe=2" in capsys.readouterr().out


def test_ls_says_what_is_not_whole(capsys: Captured) -> None:
    write()
    Path(f"runs/last.ckpt/model-00000-{SAVE_ID}.safetensors").unlink()
    Path("runs/cut.ckpt").write_bytes(b"PK\3\4")
    write_plain("runs/model.pt")
    kinds = {Path(one["path"]).name: (one["kind"], one["problem"]) for one in printed("ls runs", capsys, code=1)}
    assert kinds["last.ckpt"][0] == "incomplete" and "safetensors is missing" in kinds["last.ckpt"][1]
    assert kinds["cut.ckpt"][0] == "incomplete"
    assert kinds["model.pt"] == ("file", "")


def test_ls_of_nothing(capsys: Captured) -> None:
    assert run("ls") == 0
    assert capsys.readouterr().out == "no checkpoints in .\n"
    assert run("ls nowhere") == 2
    assert capsys.readouterr().err == "hanayo: error: nowhere: there is no such file or folder\n"


def test_no_name_is_cut_or_taken_for_markup(capsys: Captured) -> None:
    print_table(["checkpoint", "size"], [["[bold]" + "n" * 200, "1 B"]])
    assert "[bold]" + "n" * 200 in capsys.readouterr().out


def test_ls_does_not_follow_links_and_runs_no_pickle(here: Path, capsys: Captured) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (here / "ran",)

    torch.save({"epoch": Evil()}, "evil.ckpt")
    Path("link").symlink_to(here)
    assert [one["path"] for one in printed("ls", capsys)] == ["./evil.ckpt"]
    assert run("verify evil.ckpt") == 0
    assert not Path("ran").exists()


# show


def test_show_says_what_is_in_a_folder(capsys: Captured) -> None:
    write()
    facts = printed("show runs/last.ckpt -n 1", capsys)
    assert (facts["step"], facts["epoch"], facts["layout"]) == (10, 1, {"pipe": 2})
    assert facts["bytes_by_kind"] == {"model": 48, "optimizer": 4}
    assert facts["state"] == {"callbacks": ["ModelCheckpoint"], "global_step": []}
    largest = {"name": "model/net.0.weight", "shape": [3, 4], "dtype": "F32", "num_bytes": 48, "num_parts": 1}
    assert facts["largest"] == [largest]
    assert run("show runs/last.ckpt") == 0
    assert "model/net.0.weight" in capsys.readouterr().out


def test_show_of_a_folder_that_is_not_whole_gives_one(capsys: Captured) -> None:
    write()
    flip("runs/last.ckpt/manifest.json", -5)
    assert run("show runs/last.ckpt") == 1
    assert "manifest.json is damaged" in capsys.readouterr().err


def test_show_of_a_plain_file_says_what_is_known_without_reading_it(capsys: Captured) -> None:
    write_plain()
    facts = printed("show runs/best.ckpt", capsys)
    assert facts["kind"] == "file"
    assert run("show runs/best.ckpt") == 0
    assert capsys.readouterr().out.startswith("runs/best.ckpt: a plain file, ")


@pytest.mark.parametrize("subcommand", ["show", "verify"])
def test_a_folder_of_checkpoints_points_to_ls(capsys: Captured, subcommand: str) -> None:
    write()
    assert run(f"{subcommand} runs") == 1
    assert "runs has no manifest.json" in (said := " ".join(capsys.readouterr().err.split()))
    assert "To list those in it: hanayo ckpt ls runs" in said


# verify


def test_verify_names_file_and_tensor_of_a_flipped_bit(capsys: Captured) -> None:
    write()
    assert run("verify runs/last.ckpt") == 0
    assert capsys.readouterr().out == "runs/last.ckpt: whole\n"
    flip(f"runs/last.ckpt/model-00000-{SAVE_ID}.safetensors", -1)
    assert run("verify runs/last.ckpt") == 1
    message = capsys.readouterr().err
    assert f"model-00000-{SAVE_ID}.safetensors" in message and "net.0.weight" in message


def test_verify_finds_a_flipped_bit_in_a_plain_file(capsys: Captured) -> None:
    write_plain()
    position = Path("runs/best.ckpt").read_bytes().index(torch.arange(12.0).numpy().tobytes())
    flip("runs/best.ckpt", position + 5)
    assert run("verify runs/best.ckpt") == 1
    assert "best.ckpt is damaged: its record best/data/0 has other bytes" in capsys.readouterr().err


def test_verify_of_a_truncated_file(capsys: Captured) -> None:
    write_plain()
    Path("runs/best.ckpt").write_bytes(Path("runs/best.ckpt").read_bytes()[:500])
    assert run("verify runs/best.ckpt") == 1
    assert "runs/best.ckpt is truncated or damaged, 500 bytes: " in capsys.readouterr().err


def test_verify_goes_on_after_one_that_is_not_whole(capsys: Captured) -> None:
    write()
    write("runs/other.ckpt")
    flip(f"runs/last.ckpt/state-{SAVE_ID}.json", 3)
    results = printed("verify runs/last.ckpt runs/other.ckpt", capsys, code=1)
    assert [one["whole"] for one in results] == [False, True]
    assert f"state-{SAVE_ID}.json" in results[0]["problem"]


# rm


def test_rm_refuses_what_is_no_checkpoint_and_removes_nothing(capsys: Captured) -> None:
    write()
    Path("runs/notes").mkdir()
    Path("runs/notes/a.txt").write_text("")
    assert run("rm -y runs/last.ckpt runs/notes") == 2
    assert "runs/notes is no checkpoint" in capsys.readouterr().err
    assert run("verify runs/last.ckpt") == 0


def test_rm_asks_and_needs_a_terminal_for_that(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    write()
    assert run("rm runs/last.ckpt") == 2
    assert "give --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin.readline", lambda: "n\n", raising=False)
    assert run("rm runs/last.ckpt") == 1 and Path("runs/last.ckpt").exists()
    monkeypatch.setattr("sys.stdin.readline", lambda: "y\n", raising=False)
    assert run("rm runs/last.ckpt") == 0 and not Path("runs/last.ckpt").exists()


def test_rm_keeps_files_of_others(capsys: Captured) -> None:
    write()
    Path("runs/last.ckpt/notes.txt").write_text("")
    assert run("rm -y runs/last.ckpt") == 1
    assert "notes.txt" in capsys.readouterr().err
    assert [path.name for path in Path("runs/last.ckpt").iterdir()] == ["notes.txt"]


def test_rm_removes_leftovers() -> None:
    write("runs/last.ckpt.tmp-0123abcd")
    assert run("rm -y runs/last.ckpt.tmp-0123abcd") == 0
    assert list(Path("runs").iterdir()) == []


# diff, export


def save_plain(path: str, **changed: Any) -> None:
    """Write a file of Lightning, with an optimizer's states."""
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 4)}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    weights = {"net.0.weight": torch.arange(12.0).reshape(3, 4)}
    content = {"epoch": 2, "global_step": 1000, "loops": {"a": [1, 2]}, "pytorch-lightning_version": "2.6.6"}
    torch.save(content | {"state_dict": weights, "optimizer_states": [optimizer]} | changed, path)


def test_diff_of_a_folder_and_the_file_that_it_was_made_of(capsys: Captured) -> None:
    save_plain("plain.ckpt")
    write_checkpoint("folder.ckpt", torch.load("plain.ckpt", weights_only=True))
    assert run("diff folder.ckpt plain.ckpt") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal: 10 tensors and values"
    assert run("export folder.ckpt again.ckpt --to file") == 0
    capsys.readouterr()
    assert printed("diff plain.ckpt again.ckpt", capsys)["equal"]


def test_diff_names_each_difference_and_its_size(capsys: Captured) -> None:
    save_plain("a.ckpt")
    changed = torch.arange(12.0).reshape(3, 4)
    changed[0, 0], changed[2, 3] = 0.5, float("nan")
    save_plain("b.ckpt", global_step=1001, state_dict={"net.0.weight": changed, "net.1.weight": torch.ones(1)})
    found = printed("diff a.ckpt b.ckpt", capsys, code=1)["differences"]
    assert [(one["name"], one["what"], one["largest"]) for one in found] == [
        ("global_step", "1000 and 1001", 1),
        ("state_dict/net.0.weight", "2 of 12 values", float("inf")),
        ("state_dict/net.1.weight", "only in the second", None),
    ]
    assert run("diff a.ckpt b.ckpt --model -n 1") == 1
    output = capsys.readouterr().out
    assert "2 of 2 tensors and values differ, first state_dict/net.0.weight" in output and "and 1 more" in output


def test_diff_tells_shapes_and_dtypes(capsys: Captured) -> None:
    save_plain("a.ckpt", state_dict={"w": torch.ones(2), "v": torch.ones(2)})
    save_plain("b.ckpt", state_dict={"w": torch.ones(3), "v": torch.ones(2).half()})
    found = printed("diff a.ckpt b.ckpt", capsys, code=1)["differences"]
    assert [one["what"] for one in found] == ["shapes [2] and [3]", "float32 and float16"]


def test_export_says_what_it_has_written(capsys: Captured) -> None:
    save_plain("plain.ckpt")
    assert printed("export plain.ckpt out --to safetensors", capsys)["files"] == ["model.safetensors"]
    assert run("export plain.ckpt out --to safetensors") == 2
    assert "out exists" in capsys.readouterr().err
    assert run("export plain.ckpt other --to huggingface") == 2
    assert "--config" in capsys.readouterr().err


def test_export_of_a_damaged_checkpoint_gives_one(capsys: Captured) -> None:
    save_plain("plain.ckpt")
    write_checkpoint("folder.ckpt", torch.load("plain.ckpt", weights_only=True))
    [file] = Path("folder.ckpt").glob("model-*")
    flip(str(file), -1)
    assert run("export folder.ckpt whole.ckpt --to file") == 1
    assert "net.0.weight" in capsys.readouterr().err and not Path("whole.ckpt").exists()


def test_sizes_are_read_and_written_as_people_do() -> None:
    assert [size_text(one) for one in (0, 999, 1000, 2_500_000)] == ["0 B", "999 B", "1.0 kB", "2.5 MB"]
    assert [size(one) for one in ("5GB", "1.5 kb", "7B")] == [5 * 10**9, 1500, 7]
