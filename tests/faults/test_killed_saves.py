"""A rank is killed during a save, or its disk is full: the checkpoint of before, or the new one, is whole and resumes.

step               2            4                                      4                8
uninterrupted      last.ckpt    last.ckpt                              last.ckpt        the end
                                killed: last.ckpt of step 2 or 4  -->  resumed          the same end
"""

import ctypes
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import MANIFEST
from lightning_hanayo.dist_checkpointing.target import Point
from tests.faults import saving_script
from tests.faults.saving_script import STEPS, Killed
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, Outcome, assert_bit_equal, merge
from tests.strategy.checkpoints.saving_runs import step_of

PIPE, CUBE, ALONE = Layout(2), Layout(1, cube=(1, 2, 1)), Layout()
KILLED = [
    (layout, point, rank, in_background)
    for layout in (PIPE, CUBE)
    for point in (Point.FOLDER_MADE, Point.HALF_WRITTEN, Point.GATHERED, Point.MANIFEST_READY, Point.COMMITTED)
    for rank in (0, 1)
    for in_background in (False, True)
]


@pytest.fixture(scope="module")
def uninterrupted(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Outcome]:
    """The outcome of a run on a layout."""
    return cache(lambda layout: run(pool, layout, tmp_path_factory.mktemp("uninterrupted")))


def run(pool: Pool, layout: Layout, folder: Path, **options: Any) -> Outcome:
    return merge(pool.run(layout.world_size, _train, layout, folder, options), layout)


def _train(layout: Layout, folder: Path, options: dict[str, Any]) -> Outcome:
    return saving_script.train(layout, folder, **options)


def check_resumes(pool: Pool, layout: Layout, folder: Path, expected: Outcome) -> None:
    """What is in the folder leads to the same end as a run that nothing has interrupted, and then is all there is."""
    resumed = run(pool, layout, folder, start=folder / "last.ckpt")
    assert_bit_equal(resumed.weights, expected.weights)
    check_kept(folder)


def check_kept(folder: Path) -> None:
    """There is the checkpoint of the end, and no file besides."""
    assert step_of(folder / "last.ckpt") == STEPS
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]
    if (folder / "last.ckpt").is_dir():
        kept = {path.name for path in (folder / "last.ckpt").iterdir()}
        assert kept == {MANIFEST, *CheckpointFolder(folder / "last.ckpt").manifest.files}


@pytest.mark.parametrize(
    ("layout", "point", "rank", "in_background"),
    covered(KILLED, by=[(PIPE, Point.HALF_WRITTEN, 1, True)]),
    ids=str,
)
def test_a_rank_killed_during_its_second_save_leaves_a_checkpoint_that_resumes(
    pool: Pool,
    tmp_path: Path,
    uninterrupted: Callable[[Layout], Outcome],
    layout: Layout,
    point: Point,
    rank: int,
    in_background: bool,
) -> None:
    options = {"at": Killed(point, rank), "save_async": in_background}
    with pytest.raises(RunFailed) as failed:
        run(pool, layout, tmp_path, **options)
    assert [one.rank for one in failed.value.failures if one.kind == "died"] == [rank]
    assert not any(one.kind == "timed out" for one in failed.value.failures), failed.value
    assert step_of(tmp_path / "last.ckpt") in (2, 4)
    check_resumes(pool, layout, tmp_path, uninterrupted(layout))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_killed_at_any_moment_leaves_a_checkpoint_that_resumes(pool: Pool, tmp_path: Path, seed: int) -> None:
    with pytest.raises(RunFailed):
        pool.run(2, saving_script.train_for, 0.013 * seed, PIPE, tmp_path, seed % 2)
    assert 1 <= step_of(tmp_path / "last.ckpt") <= STEPS
    run(pool, PIPE, tmp_path, start=tmp_path / "last.ckpt", every=1)
    check_kept(tmp_path)


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    """A folder for temporary files from which no file can be renamed into `tmp_path`."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


FILES = [  # a file of each save
    (ALONE, {}, "last.ckpt.tmp-"),
    (PIPE, {"save_full": True}, "last.ckpt.tmp-"),
    (PIPE, {}, "optimizer-"),
]


@pytest.mark.parametrize(("layout", "options", "file"), covered(FILES, by=FILES[:1]), ids=str)
def test_a_checkpoint_survives_with_temporary_files_on_another_file_system(
    pool: Pool, tmp_path: Path, other_file_system: Path, layout: Layout, options: dict[str, Any], file: str
) -> None:
    size = layout.world_size
    with pytest.raises(RunFailed):
        pool.run(size, _train_until_synced, other_file_system, layout, tmp_path, file, options)
    assert step_of(tmp_path / "last.ckpt") == 2
    assert not list(other_file_system.iterdir())
    expected = run(pool, layout, tmp_path / "uninterrupted", **options)
    shutil.rmtree(tmp_path / "uninterrupted")
    options = options | {"start": tmp_path / "last.ckpt"}
    resumed = pool.run(size, _train_elsewhere, other_file_system, layout, tmp_path, options)
    assert_bit_equal(merge(resumed, layout).weights, expected.weights)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def _train_elsewhere(temporary: Path, layout: Layout, folder: Path, options: dict[str, Any]) -> Outcome:
    with saving_script.temporary_files_in(temporary):
        return saving_script.train(layout, folder, **options)


def _train_until_synced(temporary: Path, layout: Layout, folder: Path, file: str, options: dict[str, Any]) -> Outcome:
    with saving_script.temporary_files_in(temporary):
        return saving_script.train_until_synced(layout, folder, file, **options)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """Mount a file system of this size on the folder. Only root may."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={num_bytes}".encode()):
        pytest.skip("this user can't mount a file system")
    try:
        yield
    finally:
        libc.umount2(str(folder).encode(), 2)


@pytest.mark.thorough
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_an_error_on_all_ranks_and_the_checkpoint_of_before_resumes(
    pool: Pool, tmp_path: Path, uninterrupted: Callable[[Layout], Outcome], in_background: bool
) -> None:
    disk = tmp_path / "disk"
    run(pool, PIPE, tmp_path / "first", every=STEPS)
    size = sum(path.stat().st_size for path in (tmp_path / "first" / "last.ckpt").iterdir())
    with small_disk(disk, int(1.5 * size)):
        with pytest.raises(RunFailed) as failed:
            run(pool, PIPE, disk / "run", save_async=in_background)
        assert {one.kind for one in failed.value.failures} == {"CheckpointError", "PeerFailed"}
        assert "last.ckpt (step 4) was not saved: no space left" in failed.value.first.message
        assert [path.name for path in (disk / "run").iterdir()] == ["last.ckpt"]
        assert step_of(disk / "run" / "last.ckpt") == 2
        shutil.copytree(disk / "run", tmp_path / "run")
    resumed = run(pool, PIPE, tmp_path / "resumed", start=tmp_path / "run" / "last.ckpt")
    assert_bit_equal(resumed.weights, uninterrupted(PIPE).weights)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [ALONE, PIPE], ids=str)
def test_a_folder_that_can_not_be_written_is_found_before_training(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed) as failed:
        run(pool, layout, tmp_path / "file" / "run")
    assert "can't write to" in failed.value.first.message
    assert "training_step" not in failed.value.first.trace
