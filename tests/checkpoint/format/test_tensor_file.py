"""Files with tensors are written one tensor after another, in safetensors' own format."""

import io
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from xxhash import xxh3_128

from lightning_hanayo.dist_checkpointing.format import header_length, read_header
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor, write_tensors
from lightning_hanayo.errors import CheckpointError

MEGABYTE = 2**20


def test_the_safetensors_library_reads_it() -> None:
    file = io.BytesIO()
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.tensor(True),
        "c": torch.zeros(2, 0),
        "d": torch.ones(3).half(),
    }
    write_tensors(file, tensors)
    stored = load(file.getvalue())
    assert {key: one.tolist() for key, one in stored.items()} == {key: one.tolist() for key, one in tensors.items()}
    assert {key: one.dtype for key, one in stored.items()} == {key: one.dtype for key, one in tensors.items()}


def test_views_are_written_as_what_they_show() -> None:
    file = io.BytesIO()
    base = torch.arange(6.0).view(2, 3)
    wave = torch.tensor([1 + 2j])
    write_tensors(file, {"t": base.t(), "row": base[1], "conj": wave.conj(), "grad": base.clone().requires_grad_()})
    stored = load(file.getvalue())
    assert stored["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert stored["row"].tolist() == [3, 4, 5]
    assert stored["conj"].tolist() == [1 - 2j]
    assert stored["grad"].tolist() == base.tolist()


def test_it_says_what_it_wrote() -> None:
    """Sizes and hashes are those of the bytes in the file, and each tensor is aligned."""
    file = io.BytesIO()
    stored, hashes = write_tensors(
        file, {"odd": torch.ones(3, dtype=torch.uint8), "a": torch.arange(3.0), "b": torch.ones(5).half()}
    )
    data = file.getvalue()
    length = header_length(data[:8], len(data))
    assert stored.num_bytes == len(data)
    assert stored.xxh3_128 == xxh3_128(data[:length]).hexdigest()
    entries = read_header(data[:length], len(data))
    assert list(entries) == ["a", "b", "odd"]
    assert [entry.start % width for entry, width in zip(entries.values(), [4, 2, 1], strict=True)] == [0, 0, 0]
    assert hashes == {key: xxh3_128(data[one.start : one.stop]).hexdigest() for key, one in entries.items()}


class Counted:
    """A file that counts how much of its writer's memory it sees at once."""

    def __init__(self) -> None:
        self.written = self.longest = 0

    def write(self, data: memoryview | bytes) -> None:
        self.written += len(data)
        self.longest = max(self.longest, len(data))


def test_values_are_made_one_at_a_time() -> None:
    """Stored tensors are read when they are written; each is freed before the next one is read."""
    made: list[ReferenceType[Any]] = []

    def read(_: object) -> Tensor:
        assert not any(memory() is not None for memory in made)
        memory = np.ones((2, MEGABYTE), dtype=np.float32)
        made.append(ref(memory))
        return torch.from_numpy(memory)

    file = Counted()
    stored, _ = write_tensors(file, {str(i): StoredTensor.of((2, MEGABYTE), torch.float32, read) for i in range(3)})
    assert len(made) == 3
    assert file.written == stored.num_bytes > 3 * 8 * MEGABYTE
    assert file.longest <= 4 * MEGABYTE


@pytest.mark.parametrize(
    "tensor", [torch.ones(2).to_sparse(), torch.empty(2, dtype=torch.bits8), TwoTensor(torch.ones(2), torch.ones(2))]
)
def test_what_the_format_doesnt_have_is_refused_before_anything_is_written(tensor: Tensor) -> None:
    file = Counted()
    with pytest.raises(
        CheckpointError,
        match=r"The tensor b \((torch\.bits8|a \w+ in torch.float32, torch\.\w+)\) can't be stored .*save_full=True",
    ):
        write_tensors(file, {"a": torch.ones(2), "b": tensor})
    assert file.written == 0
