"""A region is copied out of the parts that have some of it, and little more is read."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import StoredPart, WholeTensor
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.dist_checkpointing.tensor_file import read_region
from tests.checkpoint.folders import part_of, write_folder
from tests.checkpoint.mapped_bytes import mapped_bytes

MEGABYTE = 2**20
counts_pages = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts pages with /proc")


def stored(shape: tuple[int, ...], regions: list[Region]) -> WholeTensor:
    return WholeTensor(shape, "F32", tuple(StoredPart(f"{i}", "a", one, "") for i, one in enumerate(regions)))


def test_of_each_part_the_wanted_rows_are_asked_for() -> None:
    """Rows 2, 3 and 4 of parts 0 to 2 and 3 to 7, with 4 columns of 4 bytes:

    part 0    0 1 2         one row, from byte 32 on
    part 1    3 4 5 6 7     two rows, from byte 0 on
    part 2    8 9           none
    """
    whole = torch.arange(40.0).view(10, 4)
    rows = [range(3), range(3, 8), range(8, 10)]
    regions = [Region.of_entries([one, range(4)]) for one in rows]
    asked = []

    def part_bytes(part: StoredPart, start: int, stop: int) -> memoryview:
        asked.append((part.file, start, stop))
        return memoryview(part_of(whole, part.region).numpy().tobytes())[start:stop]

    wanted = Region.of_entries([[4, 2, 3], [1, 2]])
    assert read_region(stored((10, 4), regions), wanted, part_bytes).tolist() == [[17, 18], [9, 10], [13, 14]]
    assert asked == [("0", 32, 48), ("1", 0, 32)]


@given(st.data())
def test_any_region_of_any_parts_is_read(data: st.DataObject) -> None:
    """Both dimensions are divided among two or three, in any way; any entries are wanted, in any order."""
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    divided: list[list[list[int]]] = []
    for size in shape:
        owner = [data.draw(st.integers(0, 2)) for _ in range(size)]
        order = data.draw(st.permutations(range(size)))
        divided.append([[i for i in order if owner[i] == rank] for rank in range(3)])
    regions = [Region.of_entries([rows, columns]) for rows in divided[0] for columns in divided[1]]
    wanted = Region.of_entries(
        [data.draw(st.lists(st.integers(0, size - 1), unique=True)) for size in shape],
    )

    def part_bytes(part: StoredPart, start: int, stop: int) -> memoryview:
        return memoryview(part_of(whole, part.region).numpy().tobytes())[start:stop]

    assert torch.equal(read_region(stored(shape, regions), wanted, part_bytes), part_of(whole, wanted))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[memoryview]]:
    """The ranges of files that are mapped into memory, which stay mapped."""
    ranges: list[memoryview] = []
    read: Callable[..., memoryview] = Storage.read

    def keep(*args: Any) -> memoryview:
        ranges.append(read(*args))
        return ranges[-1]

    monkeypatch.setattr(Storage, "read", keep)
    yield ranges
    ranges.clear()


@counts_pages
def test_only_the_pages_with_wanted_entries_are_read(tmp_path: Path, kept: list[memoryview]) -> None:
    """Of two rows of 24 MB each, 1 MB of the first are read, up to the pages around them, of at most 2 MB."""
    write_folder(tmp_path, {"model/a": torch.zeros(2, 6 * MEGABYTE)})
    folder = CheckpointFolder(tmp_path)
    (file,) = (tmp_path / name for name in folder.manifest.files)
    columns = range(3 * MEGABYTE, 3 * MEGABYTE + MEGABYTE // 4)
    folder.header(file.name)
    before = mapped_bytes(file)
    assert before <= 2 * MEGABYTE
    folder.read("model/a", Region.of_entries([[0], columns]))
    assert len(kept[-1]) == 24 * MEGABYTE
    assert MEGABYTE <= mapped_bytes(file) - before <= 5 * MEGABYTE


@counts_pages
def test_no_mapping_stays(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model/a": torch.zeros(2, 1000)})
    folder = CheckpointFolder(tmp_path)
    folder.verify()
    values = folder.read("model/a")
    assert all(mapped_bytes(file) == 0 for file in tmp_path.iterdir())
    assert values.sum() == 0
