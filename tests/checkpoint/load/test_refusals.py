"""A checkpoint folder that isn't what was written is refused, with the file and the tensor in the message."""

import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import MANIFEST
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.folders import SAVE_ID, write_folder

OTHER_SAVE = "00c0ffee"


def write(path: Path, *, seed: int = 0, save_id: str = SAVE_ID) -> Path:
    """Two ranks' parts of a weight and of its optimizer state, a bias, and two documents."""
    generator = torch.Generator().manual_seed(seed)
    whole = {
        "model/weight": torch.randn(8, 6, generator=generator),
        "model/bias": torch.randn(6, generator=generator).bfloat16(),
        "optimizer/0/weight/exp_avg": torch.randn(8, 6, generator=generator),
        "optimizer/0/weight/step": torch.tensor(10.0),
    }
    halves = [Region.of_entries([range(4), range(6)]), Region.of_entries([range(4, 8), range(6)])]
    cut = {name: halves for name, tensor in whole.items() if tensor.dim() == 2}
    write_folder(
        path, whole, cut, texts={"state": b'{"loops": {"epoch": 1}}', "state-data-00000": b"{}"}, save_id=save_id
    )
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint, which tests copy before they change it."""
    return write(tmp_path_factory.mktemp("original") / "last.ckpt")


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "last.ckpt")


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def message(path: Path) -> str:
    """What opening and verifying a folder raises, in one line that names the folder; "" if it raises nothing."""
    try:
        CheckpointFolder(path).verify()
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert str(path) in str(error)
        return str(error)
    return ""


@dataclass(frozen=True)
class Place:
    """A byte of a folder, and the tensor that it belongs to, if it does to one."""

    file: str
    byte: int
    tensor: str | None


def places(path: Path) -> list[Place]:
    """All bytes of a folder."""
    folder = CheckpointFolder(path)
    found = []
    for file in files_of(path):
        owners: list[str | None] = [None] * file.stat().st_size
        if file.suffix == ".safetensors":
            for key, entry in folder.header(file.name).items():
                owners[entry.start : entry.stop] = [folder.parts[file.name][key].name] * (entry.stop - entry.start)
        found += [Place(file.name, byte, owner) for byte, owner in enumerate(owners)]
    return found


def test_a_whole_folder_is_not_refused(path: Path) -> None:
    assert message(path) == ""


def test_each_of_50_flipped_bits_is_found(path: Path) -> None:
    """50 bits, evenly spaced over all files, are flipped one after another."""
    everywhere = places(path)
    chosen = [everywhere[i * len(everywhere) // 50] for i in range(50)]
    assert {place.file for place in chosen} >= {file.name for file in files_of(path) if file.stat().st_size > 100}
    assert {place.tensor for place in chosen} >= {None, "model/weight", "optimizer/0/weight/exp_avg"}
    for number, place in enumerate(chosen):
        file = path / place.file
        clean = file.read_bytes()
        flipped = bytearray(clean)
        flipped[place.byte] ^= 1 << number % 8
        file.write_bytes(flipped)
        said = message(path)
        assert place.file in said, place
        assert place.tensor is None or f"the values of {place.tensor} aren't" in said, place
        file.write_bytes(clean)
    assert message(path) == ""


@pytest.mark.thorough
def test_each_flipped_bit_is_found(path: Path) -> None:
    for place in places(path):
        file = path / place.file
        clean = file.read_bytes()
        for bit in range(8):
            flipped = bytearray(clean)
            flipped[place.byte] ^= 1 << bit
            file.write_bytes(flipped)
            said = message(path)
            assert place.file in said
            assert (place.tensor or "") in said
        file.write_bytes(clean)


def test_a_header_that_changes_after_it_was_read_is_found(path: Path) -> None:
    folder = CheckpointFolder(path)
    folder.verify()
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b"dtype", b"Dtype", 1))
    with pytest.raises(CheckpointError, match="its header isn't the one that save"):
        folder.verify()


def test_truncated_files_are_found_by_their_sizes(path: Path) -> None:
    """Without reading them: opening is enough. A manifest has its hash."""
    for file in files_of(path):
        clean = file.read_bytes()
        for length in {i for i in (0, 1, 7, 8, 9, len(clean) // 2, len(clean) - 1) if i < len(clean)}:
            file.write_bytes(clean[:length])
            with pytest.raises(CheckpointError) as caught:
                CheckpointFolder(path)
            if file.name == MANIFEST:
                assert f"{file} is damaged: its " in str(caught.value)
            else:
                assert f"{file} is damaged: it is truncated, {length} instead of {len(clean)} bytes" in str(
                    caught.value
                )
        file.write_bytes(clean)


def test_a_file_that_has_grown_is_found(path: Path) -> None:
    for file in files_of(path):
        clean = file.read_bytes()
        file.write_bytes(clean + b"\0")
        assert f"{file} is damaged" in message(path)
        file.write_bytes(clean)


def test_missing_files_are_named(path: Path) -> None:
    for file in files_of(path):
        clean = file.read_bytes()
        file.unlink()
        assert f"{path} has no {MANIFEST}" in message(path) or f"{file} is missing" in message(path)
        file.write_bytes(clean)


def test_a_file_of_another_save_is_found(path: Path, tmp_path: Path) -> None:
    """It has tensors of the same names and shapes, and this save's file name."""
    other = write(tmp_path / "other.ckpt", seed=1, save_id=OTHER_SAVE)
    for file in path.glob("*.safetensors"):
        clean = file.read_bytes()
        file.write_bytes((other / file.name.replace(SAVE_ID, OTHER_SAVE)).read_bytes())
        assert f"{file} is damaged: its header isn't the one that save {SAVE_ID} wrote" in message(path)
        file.write_bytes(clean)


def test_files_of_two_ranks_cant_change_places(path: Path) -> None:
    """Their headers are equal; their values aren't."""
    first, second = (path / f"optimizer-{rank:05}-{SAVE_ID}.safetensors" for rank in range(2))
    header = CheckpointFolder(path).header(second.name)["optimizer/0/weight/exp_avg"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        os.rename(first, "aside")
        os.rename(second, first)
        os.rename("aside", second)
    said = message(path)
    assert re.search(r"optimizer-0000[01]-\w+\.safetensors is damaged", said)
    assert header.shape == (4, 6)


def test_the_manifest_of_another_save_doesnt_find_its_files(path: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.ckpt", seed=1, save_id=OTHER_SAVE)
    shutil.copy(other / MANIFEST, path / MANIFEST)
    assert re.search(rf"{OTHER_SAVE}\.\w+ is missing\. Copy the whole folder", message(path))


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("same_size", [True, False])
@pytest.mark.parametrize("saved_by", ["pickle", "torch"])
def test_a_pickle_in_place_of_a_file_is_never_opened(
    path: Path, saved_by: str, same_size: bool, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    pickled = tmp_path / "pickled"
    if saved_by == "torch":
        torch.save(Canary(canary), pickled)
    else:
        pickled.write_bytes(pickle.dumps(Canary(canary)))
    for file in files_of(path):
        clean = file.read_bytes()
        data = pickled.read_bytes()
        file.write_bytes(data[: len(clean)].ljust(len(clean), b"\0") if same_size else data)
        assert str(file) in message(path)
        file.write_bytes(clean)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists(), "the canary would have written a file"


def test_what_is_no_checkpoint_says_so(path: Path, tmp_path: Path) -> None:
    assert f"There is no checkpoint {tmp_path / 'nowhere'}" in message(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty} has no manifest.json: it is no checkpoint of HanayoStrategy, or the save" in message(empty)
    assert "is a file, and not the folder of a checkpoint" in message(path / MANIFEST)
    unfinished = tmp_path / f"last.ckpt.tmp-{SAVE_ID}"
    unfinished.mkdir()
    said = message(unfinished)
    assert f"{unfinished} has no manifest.json: it is no checkpoint of HanayoStrategy, or the save was" in said


def test_links_to_files_elsewhere_are_not_followed(path: Path, tmp_path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert f"{file} is missing" in message(path)


def test_what_is_no_regular_file_isnt_opened(path: Path) -> None:
    """Opening a pipe would wait for a writer."""
    file = path / f"state-{SAVE_ID}.json"
    file.unlink()
    os.mkfifo(file)
    assert f"{file} is missing" in message(path)


def test_a_file_that_vanishes_while_it_is_read_is_an_error(path: Path) -> None:
    folder = CheckpointFolder(path)
    for file in path.glob("*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"safetensors can't be read: No such file"):
        folder.verify()
    with pytest.raises(CheckpointError, match=r"json can't be read: No such file"):
        folder.text("state")


def test_documents_are_checked_without_being_asked(path: Path) -> None:
    (path / f"state-{SAVE_ID}.json").write_bytes(b'{"loops": {"epoch": 2}}')
    with pytest.raises(CheckpointError, match=rf"state-{SAVE_ID}\.json is damaged: its text isn't the one that save"):
        CheckpointFolder(path).text("state")


def test_random_bytes_are_no_checkpoint(path: Path) -> None:
    """A manifest of any bytes is damaged, whatever they are."""
    generator = random.Random(0)
    for length in range(0, 300, 7):
        (path / MANIFEST).write_bytes(generator.randbytes(length))
        assert f"{path / MANIFEST} is damaged" in message(path)
