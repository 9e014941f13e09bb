"""Real runs of torchrun: ranks and nodes are killed, and the run ends as if nothing had happened."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.launch import ROOT, Ended, launch

SCRIPT = str(ROOT / "tests" / "faults" / "restarted.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(folder: Path, *arguments: str) -> Ended:
    folder.mkdir(exist_ok=True)
    return launch(folder, *arguments, timeout=240.0, limit=30.0)


def trained(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "trained.pt")
    return found


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


@pytest.mark.thorough
@pytest.mark.parametrize(("rank", "step"), [(0, 1), (1, 7), (0, 13)])
def test_a_killed_rank_changes_no_bit_of_the_weights(tmp_path: Path, rank: int, step: int) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert run(undisturbed, *TORCHRUN, SCRIPT, str(undisturbed)).code == 0
    ended = run(disturbed, *TORCHRUN, "--max-restarts=1", SCRIPT, str(disturbed), "--kill", str(rank), str(step))
    assert ended.code == 0, ended.output[-4000:]
    assert starts(disturbed) == ["0 2", "1 2"]
    resumed = f"saved after step {step // 2 * 2}" if step > 1 else "starts from its beginning"
    assert ended.output.count("Restart: ") == 1 and resumed in ended.output
    expected, actual = trained(undisturbed), trained(disturbed)
    assert actual["step"] == expected["step"]
    assert all(torch.equal(value, expected["weights"][name]) for name, value in actual["weights"].items())


@pytest.mark.thorough
def test_a_new_start_into_a_folder_with_checkpoints_resumes_nothing(tmp_path: Path) -> None:
    command = (*TORCHRUN, "--rdzv-id=same", SCRIPT, str(tmp_path))
    for _ in range(2):
        ended = run(tmp_path, *command)
        assert ended.code == 0, ended.output[-4000:]
        assert "Restart" not in ended.output


@pytest.mark.thorough
def test_with_a_node_fewer_steps_take_as_many_samples(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    arguments = (str(tmp_path), "--data", "auto", "--nodes", "2", "--plain", "--kill", "3", "3")
    ended = run(tmp_path, str(ROOT / "tests" / "faults" / "two_agents.py"), port, SCRIPT, *arguments)
    assert ended.code == 0, ended.output[-4000:]
    assert starts(tmp_path) == ["0 4", "1 2"]
    assert "an optimizer step still takes 8 samples: 4 x 1 data ranks x 2 accumulated batches = 8" in ended.output
    assert trained(tmp_path)["step"] == 12
