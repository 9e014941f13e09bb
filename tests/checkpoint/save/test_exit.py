"""The end of a process while its thread waits for other ranks: nothing keeps it, and its own error is what it shows."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_hanayo.dist_checkpointing.commit import SavingRanks
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import Point
from tests.checkpoint.save.states import part_of
from tests.harness.limits import real_seconds

ROOT = Path(__file__).parents[3]


def main(path: str, store: str, rank: int, dies: bool) -> None:
    """Rank 1 is killed in the middle of a save, or goes on training for ever; rank 0 has an error of its own."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    background = dist.new_group(backend="gloo")
    has_written = threading.Event()

    def at(point: Point) -> None:
        if point == Point.SYNCED:
            has_written.set()
        if (point, rank) == (Point.WRITTEN, 1):
            while not dies:
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)

    Saver(SavingRanks(dist.group.WORLD), SavingRanks(background), at=at).save(path, part_of(rank, 2))  # type: ignore[arg-type]
    if rank == 0:
        has_written.wait()  # then its thread does nothing but wait for rank 1
        raise ZeroDivisionError("in the user's step")
    signal.pause()


@pytest.mark.thorough
@pytest.mark.parametrize("dies", [True, False], ids=["rank 1 is killed", "rank 1 is alive"])
def test_no_process_waits_at_its_end_for_a_save_in_flight(tmp_path: Path, dies: bool) -> None:
    path = tmp_path / "last.ckpt"
    command = f"from {__name__} import main; main({str(path)!r}, {str(tmp_path / 'store')!r}, RANK, {dies})"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", command.replace("RANK", str(rank))],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, printed = ranks[0].communicate(timeout=real_seconds(60))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[0].returncode == 1
    assert "ZeroDivisionError: in the user's step" in printed
    assert not path.exists()
