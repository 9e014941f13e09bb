"""A process is killed at a point of a save: what can be read is the checkpoint of before, or the new one, and whole.

             BEGUN ... SYNCED   GATHERED   MANIFEST_READY   COMMITTED   CLEANED
rank 0 dies  old                old        old              new         new
rank 1 dies  old                new: rank 0 goes on, which rank 1 hears of before the points that follow
"""

import os
import signal
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_hanayo.dist_checkpointing.commit import SavingRanks
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import MANIFEST
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import Point, Storage, next_to
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.save.states import part_of, step_of
from tests.harness.object_store import ObjectStore
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered

TARGETS = ("new", "saved again", "a file", "remote", "new in the background", "saved again in the background")

CASES = covered(
    product(Point, (0, 1), TARGETS),
    by=[
        (Point.HALF_WRITTEN, 1, "new"),
        (Point.MANIFEST_READY, 0, "saved again"),
        (Point.SYNCED, 1, "remote"),
        (Point.GATHERED, 0, "saved again in the background"),
    ],
)


def save(path: str, step: int, killed: tuple[Point, int] | None, in_background: bool) -> None:
    """Save on all ranks; `killed` is at which point which rank is."""
    dist.init_process_group("gloo")
    ObjectStore.register()
    rank = dist.get_rank()

    def at(point: Point) -> None:
        if (point, rank) == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    background = SavingRanks(dist.new_group(backend="gloo")) if in_background else None
    saver = Saver(SavingRanks(dist.group.WORLD), background, at=at)  # type: ignore[arg-type]
    dist.barrier()  # all are connected
    try:
        saver.save(path, part_of(rank, step))
        saver.finish()
    except CheckpointError:
        saver.abandon()
        raise


def expected(point: Point, rank: int) -> set[int]:
    """The steps whose checkpoint may be there, if step 2 is saved over step 1."""
    if (point, rank) == (Point.GATHERED, 1):
        return {1, 2}  # rank 0 may hear of the end before it has all of what rank 1 has sent
    return {2} if point > (Point.MANIFEST_READY if rank == 0 else Point.GATHERED) else {1}


@pytest.mark.parametrize(("point", "rank", "target"), CASES)
def test_the_checkpoint_of_before_or_the_new_one_survives(
    pool: Pool, tmp_path: Path, point: Point, rank: int, target: str
) -> None:
    ObjectStore.register()
    in_background = target.endswith("background")
    path = f"objects://{tmp_path}/checkpoints/last.ckpt" if target == "remote" else str(tmp_path / "last.ckpt")
    is_new = target.startswith("new")
    if target == "a file":
        Path(path).write_bytes(b"of one process")
    elif not is_new:
        pool.run(2, save, path, 1, None, False)

    with pytest.raises(RunFailed) as failed:
        pool.run(2, save, path, 2, (point, rank), in_background)
    check_survivor(failed.value, rank)

    steps = expected(point, rank)
    if is_new and not Storage(path).is_folder():
        assert 1 in steps
        with pytest.raises(CheckpointError, match="There is no checkpoint"):
            CheckpointFolder(path)
    elif Storage(path).is_file():
        assert 1 in steps
        assert Path(path).read_bytes() == b"of one process"
    else:
        assert step_of(path) in steps

    pool.run(2, save, path, 3, None, in_background)
    assert step_of(path) == 3
    check_nothing_is_left(path)


def check_survivor(failed: RunFailed, killed: int) -> None:
    """The other rank has ended by itself; if it has raised, it says why."""
    assert [one.rank for one in failed.failures if one.kind == "died"] == [killed], str(failed)
    for other in failed.failures:
        if other.rank != killed:
            assert other.kind == "CheckpointError", str(other)
            assert "another rank has ended, or doesn't answer" in other.message


def check_nothing_is_left(path: str) -> None:
    """There is only what the manifest names."""
    folder = CheckpointFolder(path)
    assert set(Storage(path).names()) == {*folder.manifest.files, MANIFEST}
    if Storage(path).is_local:
        assert next_to(path, "tmp", "old") == []
