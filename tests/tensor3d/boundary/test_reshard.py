"""What a reshard keeps of one micro-batch for the next ones, and what ranks with other samples must agree on."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor_parallel.boundary import (
    MicrobatchReshard,
    SharedReshard,
    sample_shares,
)
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import sequence_parts
from tests.harness.pool import Pool


def shard(kind: str) -> list[tuple[int, ...]] | str:
    """What shares of one sample each reshard to on two ranks along z, or the error."""
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), Mesh.create((1, 1, 2))

    def all_gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * 2
        dist.all_gather_object(found, value)
        return found

    boundary = MicrobatchReshard(SharedReshard(mesh), all_gather, all_gather)
    boundary.begin([sample_shares(2, (1, 1, 2))])
    stream = torch.ones(1, 4, 6, requires_grad=kind != "a gradient on one rank" or rank == 0)
    mask = torch.ones(1, 4)  # as many rows as this rank has samples
    table = mask if "mask" in kind else torch.full((3, 4, 4), float(rank if kind == "values of its own" else 7))
    structure = ("mask", "plain") if kind == "structures differ" and rank else ("plain",)
    arguments = [table, stream] if kind == "structures differ" and rank else [stream, table]
    try:
        streams = [next(i for i, one in enumerate(arguments) if one is stream)]
        made = boundary.shard_arguments(0, arguments, (streams, [1] if "sequences" in kind else []), structure)
    except HanayoError as error:
        return str(error)
    return [] if made is None else [tuple(one.shape) for one in made]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("alike", [(2, 4, 3), (3, 4, 4)]),
        ("a mask of samples", [(2, 4, 3), (2, 4)]),
        ("a mask of sequences", [(2, 4, 3), (1, 4)]),
        ("structures differ", []),
        ("a gradient on one rank", "has a gradient on some ranks of the cube, and none on others"),
        ("values of its own", r"of the shape \(3, 4, 4\), has other values on other ranks of the cube"),
    ],
)
def test_what_ranks_with_other_samples_must_agree_on(pool: Pool, kind: str, expected: Any) -> None:
    for found in pool.run(2, shard, kind):
        if isinstance(expected, str):
            assert isinstance(found, str) and re.search(expected, found)
        else:
            assert found == expected


def test_a_size_of_parts_belongs_to_one_length() -> None:
    parts = sequence_parts((7, 8, 7, 10), 2)
    assert parts is not None and parts.sizes == {7: 4, 8: 5, 10: 6} and parts.length(5) == 8
    with pytest.raises(UnsupportedError, match="reads a tensor of 8 positions.* name that in `streams`"):
        parts.length(8)
    with pytest.raises(UnsupportedError, match="writes a tensor of 9 positions.* keep the length"):
        parts.size(9)
