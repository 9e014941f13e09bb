"""Ranks take the first rank's values of what any of them has changed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.object_collectives import ReplicatedTensors
from tests.harness.pool import Pool

DTYPES = (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float64, torch.int64)


def updates() -> dict[str, Any]:
    """What each update returns and leaves."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    tensors = ReplicatedTensors(world, world, torch.device("cpu"))
    scalar, strided = torch.tensor(float(rank)), torch.full((2, 3), float(rank)).t()
    own: dict[str, Tensor | None] = {str(dtype): torch.full((3,), rank, dtype=dtype) for dtype in DTYPES}
    own |= {"scalar": scalar, "strided": strided, "none": None, "empty": torch.zeros(0)}
    found = {"first": (tensors.update(own), _values(own))}
    found["nothing"] = (tensors.update(own), _values(own))
    scalar.add_(5 * rank)
    found["on rank 1"] = (tensors.update(own), _values(own))
    own["scalar"] = torch.tensor(7.0 - rank)
    found["replaced"] = (tensors.update(own), _values(own))
    strided.data.add_(1 + rank)
    found["through data"] = (tensors.update(own, {"strided"}), _values(own))
    own["scalar"] = torch.zeros(1 + rank)
    with pytest.raises(
        UnsupportedError, match=rf"^scalar is a buffer \(float32 \[{1 + rank}\] on this rank\) whose shape"
    ):
        tensors.update(own)
    return found


def _values(tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if one is None else one.tolist() for name, one in tensors.items()}


def test_all_ranks_have_the_first_ranks_values_of_what_any_has_changed(pool: Pool) -> None:
    first, second = pool.run(2, updates)
    assert first == second
    assert {name: changed for name, (changed, _) in first.items()} == {
        "first": True, "nothing": False, "on rank 1": True, "replaced": True, "through data": True,
    }  # fmt: skip
    assert first["on rank 1"][1]["scalar"] == 0.0 and first["replaced"][1]["scalar"] == 7.0
    assert first["through data"][1]["strided"] == [[1.0, 1.0]] * 3
