"""A stored tensor answers by its shape without reading, and reads its values when something computes with them.

counted = []     each read is noted as its region
"""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor
from tests.checkpoint.folders import part_of

WHOLE = torch.arange(12.0).view(4, 3)
ROWS = Region.of_entries([[0, 2], [0, 1, 2]])


@pytest.fixture
def reads() -> list[Region | None]:
    return []


@pytest.fixture
def stored(reads: list[Region | None]) -> StoredTensor:
    def read(region: Region | None) -> Tensor:
        reads.append(region)
        return WHOLE.clone() if region is None else part_of(WHOLE, region)

    return StoredTensor.of(WHOLE.shape, WHOLE.dtype, read)


def test_what_needs_no_values_reads_nothing(stored: StoredTensor, reads: list[Any]) -> None:
    assert isinstance(stored, Tensor) and torch.is_tensor(stored)
    assert stored.shape == (4, 3) and stored.dtype == torch.float32 and len(stored) == 4 and stored.numel() == 12
    assert stored.device == torch.device("cpu") and not stored.is_meta and not stored.requires_grad
    assert stored.type() == "torch.FloatTensor" and stored.is_cpu and not stored.is_pinned()
    renamed = {f"new.{name}": value.detach().cpu() for name, value in {"w": stored}.items()}
    assert isinstance(copy.deepcopy(renamed)["new.w"], StoredTensor)
    assert "not read" in repr(stored) and not reads


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: w + 1,
        lambda w: w[1:, 0],
        lambda w: torch.cat([w, w]),
        lambda w: w.norm(),
        lambda w: torch.tensor(w.tolist()),
        lambda w: torch.from_numpy(w.numpy()),
        lambda w: w.to(torch.float64),
        lambda w: w.type(torch.float64),
        lambda w: torch.zeros(4, 3).copy_(w),
        lambda w: torch.einsum("ij,ij->i", w, WHOLE),
        lambda w: w.clone().mul_(2),
        lambda w: nn.Parameter(w.clone()).detach(),
    ],
)
def test_computations_see_the_values(stored: StoredTensor, compute: Any) -> None:
    result = compute(stored)
    assert type(result) is Tensor and torch.equal(result, compute(WHOLE))


def test_torch_save_writes_the_values(stored: StoredTensor) -> None:
    file = io.BytesIO()
    torch.save({"w": stored}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["w"], WHOLE)


def test_changes_in_place_are_kept(stored: StoredTensor) -> None:
    assert stored.mul_(2) is stored
    stored[0] = 7.0
    stored += 1
    expected = (WHOLE * 2).index_fill(0, torch.tensor([0]), 7.0) + 1
    assert torch.equal(stored.read(), expected) and torch.equal(copy.deepcopy(stored).read(), expected)
    assert torch.equal(stored.read(ROWS), part_of(expected, ROWS))


def test_a_part_is_read_alone(stored: StoredTensor, reads: list[Any]) -> None:
    part = stored.part(ROWS)
    assert part.shape == (2, 3) and not reads
    assert torch.equal(part + 0, part_of(WHOLE, ROWS)) and reads == [ROWS]
    nothing = stored.part(Region.of_entries([[], [0, 1, 2]]))
    stored.zero_()
    assert nothing.shape == (0, 3) and nothing.read().shape == (0, 3)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_made_of_it_is_an_ordinary_one(stored: StoredTensor, requires_grad: bool) -> None:
    parameter = nn.Parameter(stored, requires_grad)
    assert type(parameter) is nn.Parameter and torch.equal(parameter, WHOLE)
    assert parameter.requires_grad == requires_grad and parameter.is_leaf
    assert torch.equal(stored + 0, WHOLE)


def test_a_module_loads_it(stored: StoredTensor, reads: list[Any]) -> None:
    layer = nn.Linear(3, 4, bias=False)
    layer.load_state_dict({"weight": stored})
    assert torch.equal(layer.weight, WHOLE) and type(layer.weight) is nn.Parameter and len(reads) == 1
