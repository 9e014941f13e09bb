"""A plain file is refused by the name of what is damaged in it, never runs code, and isn't read before it is used."""

import argparse
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo.dist_checkpointing.folder import verify_file
from lightning_hanayo.dist_checkpointing.plain_file import is_zip, load_mapped
from lightning_hanayo.errors import CheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    content = {
        "state_dict": {"a.weight": torch.randn(300, 7), "b.weight": torch.randn(50)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.randn(300, 7)}}}],
        "epoch": 3,
    }
    torch.save(content, tmp_path / "whole.ckpt")
    return tmp_path / "whole.ckpt"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


def data_of(path: Path, record: str) -> int:
    """Where a record's data lie."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"whole/{record}")
    return path.read_bytes().index(b"PK\x03\x04", info.header_offset) + 200


def test_a_whole_file_is_read_as_it_was_saved(path: Path) -> None:
    verify_file(str(path))
    content = load_mapped(path, weights_only=None)
    assert is_zip(path) and content["epoch"] == 3 and content["state_dict"]["a.weight"].shape == (300, 7)
    content["state_dict"]["a.weight"].zero_()  # changes no byte of the file
    assert load_mapped(path, weights_only=True)["state_dict"]["a.weight"].abs().sum() > 0


@pytest.mark.parametrize("record", ["data/0", "data/2"])
def test_a_flipped_bit_is_found_and_its_record_named(path: Path, record: str) -> None:
    flip(path, data_of(path, record))
    with pytest.raises(CheckpointError) as raised:
        verify_file(str(path))
    assert f"its record whole/{record} has other bytes" in str(raised.value) and str(path) in str(raised.value)


def test_no_flipped_bit_in_data_stays_unseen(path: Path) -> None:
    whole = path.read_bytes()
    size = path.stat().st_size
    reference = load_mapped(path, weights_only=True)
    for position in range(0, size, size // 97):
        flip(path, position)
        try:
            verify_file(str(path))
        except CheckpointError:
            pass
        else:  # a date, or a gap between records
            torch.testing.assert_close(load_mapped(path, weights_only=True), reference, rtol=0, atol=0)
        path.write_bytes(whole)


@pytest.mark.parametrize("kept", [0.3, 0.95, 0.9999])
def test_a_truncated_file_is_refused(path: Path, kept: float) -> None:
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(CheckpointError, match=f"truncated or damaged, {path.stat().st_size} bytes"):
        verify_file(str(path))


def test_ranks_share_the_bytes_and_miss_none(path: Path) -> None:
    for record in ("data/0", "data/1", "data/2", "data.pkl"):
        whole = path.read_bytes()
        flip(path, data_of(path, record))
        refusing = []
        for rank in range(3):
            try:
                verify_file(str(path), rank, 3)
            except CheckpointError:
                refusing.append(rank)
        assert len(refusing) == 1, record
        path.write_bytes(whole)


class Runs:
    """Would write a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_file_that_would_run_code_is_refused_unopened(tmp_path: Path, is_new: bool) -> None:
    path, canary = tmp_path / "bad.ckpt", tmp_path / "canary"
    torch.save({"state_dict": Runs(canary)}, path, _use_new_zipfile_serialization=is_new)
    assert is_zip(path) == is_new
    with pytest.raises(CheckpointError):
        load_mapped(path, weights_only=None)
    assert not canary.exists()


def test_a_class_that_is_not_allowed_is_named_with_the_ways_out(tmp_path: Path) -> None:
    path = tmp_path / "hparams.ckpt"
    torch.save({"hyper_parameters": argparse.Namespace(lr=1.0)}, path)
    with pytest.raises(
        CheckpointError, match=r"objects of argparse\.Namespace.*add_safe_globals\(\[Namespace\]\).*weights_only=False"
    ):
        load_mapped(path, weights_only=None)
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert load_mapped(path, weights_only=None)["hyper_parameters"].lr == 1.0
    assert load_mapped(path, weights_only=False)["hyper_parameters"].lr == 1.0
