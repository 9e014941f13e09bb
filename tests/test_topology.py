"""Ranks, coordinates and groups match the drawings of topology.py, and `resolve` completes the sizes."""

import doctest
from itertools import product
from typing import Any

import pytest

from lightning_hanayo import topology
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.topology import AXES, Topology, resolve

SHAPES = [
    Topology(),
    Topology(data=2, pipe=2),
    Topology(data=3, pipe=4),
    Topology(pipe=2, cube=(2, 2, 2)),
    Topology(data=2, pipe=2, cube=(1, 3, 2)),
]


def test_data_and_pipe_axes() -> None:
    #            pipe 0   pipe 1
    # data 0        0        1
    # data 1        2        3
    shape = Topology(data=2, pipe=2)
    assert shape.groups("pipe") == ((0, 1), (2, 3))
    assert shape.groups("data") == ((0, 2), (1, 3))
    assert shape.coordinates(2) == (1, 0, 0, 0, 0)


def test_the_cube_axes_vary_fastest() -> None:
    #            pipe 0                pipe 1
    #        y0        y1          y0        y1
    # x0    0  1      2  3        8  9     10 11        z along the row
    # x1    4  5      6  7       12 13     14 15
    shape = Topology(pipe=2, cube=(2, 2, 2))
    assert shape.group_of(0, "z") == (0, 1)
    assert shape.group_of(0, "y") == (0, 2)
    assert shape.group_of(0, "x") == (0, 4)
    assert shape.group_of(13, "y", "z") == (12, 13, 14, 15)
    assert shape.group_of(13, "pipe") == (5, 13)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranks_count_the_coordinates_with_the_last_axis_fastest(shape: Topology) -> None:
    assert [shape.coordinates(rank) for rank in range(shape.world_size)] == list(product(*map(range, shape.sizes)))


@pytest.mark.parametrize("axes", [("data",), ("pipe",), ("x", "z"), ("data", "x", "y", "z"), AXES, ()], ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_is_in_one_group(shape: Topology, axes: tuple[str, ...]) -> None:
    groups = shape.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.world_size))
    assert all(list(group) == sorted(group) for group in groups)
    for group in groups:
        fixed = {
            tuple(c for c, axis in zip(shape.coordinates(rank), AXES, strict=True) if axis not in axes)
            for rank in group
        }
        assert len(fixed) == 1, "ranks of a group differ along the named axes only"


@pytest.mark.parametrize(
    ("world_size", "sizes", "expected"),
    [
        (4, {}, Topology(pipe=4)),
        (4, {"data_parallel_size": 2}, Topology(data=2, pipe=2)),
        (4, {"pipeline_parallel_size": 2}, Topology(data=2, pipe=2)),
        (8, {"pipeline_parallel_size": 2, "cube": (1, 2, 1)}, Topology(data=2, pipe=2, cube=(1, 2, 1))),
        (4, {"pipeline_parallel_size": 2, "data_parallel_size": "auto"}, Topology(data=2, pipe=2)),
        (4, {"pipeline_parallel_size": 2, "data_parallel_size": 2}, Topology(data=2, pipe=2)),
        (6, {"data_parallel_size": "auto"}, Topology(pipe=6)),  # both "auto": no data parallelism
        (16, {"cube": 2}, Topology(pipe=2, cube=(2, 2, 2))),
        (12, {"cube": (1, 3, 2), "data_parallel_size": 2}, Topology(data=2, cube=(1, 3, 2))),
        (1, {}, Topology()),
    ],
)
def test_resolve(world_size: int, sizes: dict[str, Any], expected: Topology) -> None:
    assert resolve(world_size, **sizes) == expected


@pytest.mark.parametrize(
    ("world_size", "sizes", "named"),
    [
        (
            3,
            {"pipeline_parallel_size": 2},
            [
                "=2 needs a multiple of 2 processes, but devices x num_nodes is 3. These fit: ",
                "=3 with data_parallel_size=1",
            ],
        ),
        (
            4,
            {"pipeline_parallel_size": 3, "data_parallel_size": 2},
            ["pipeline_parallel_size=3 x data_parallel_size=2 needs 6 processes", "fit: pipeline_parallel_size=2 with"],
        ),
        (4, {"data_parallel_size": 3}, ["data_parallel_size=3 needs a multiple of 3 processes"]),
        (6, {"cube": 2}, ["cube=2x2x2 needs a multiple of 8 processes, but devices x num_nodes is 6."]),
        (4, {"pipeline_parallel_size": 8}, ["needs a multiple of 8", "fit: pipeline_parallel_size=4"]),
        (1, {"pipeline_parallel_size": 2, "cube": (1, 2, 1)}, ["cube=1x2x1 needs", "is 1: say devices=4."]),
        (4, {"pipeline_parallel_size": 0}, ["pipeline_parallel_size=0"]),
        (4, {"cube": (0, 1, 1)}, ["cube=0x1x1"]),
    ],
)
def test_sizes_that_do_not_multiply_to_the_world_size_are_refused(
    world_size: int, sizes: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(HanayoError) as caught:
        resolve(world_size, **sizes)
    assert [part for part in named if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("sizes", [{"data": 0}, {"pipe": -1}, {"cube": (1, 0, 1)}], ids=str)
def test_an_axis_has_at_least_one_rank(sizes: dict[str, Any]) -> None:
    with pytest.raises(HanayoError, match="at least one rank"):
        Topology(**sizes)


def test_topologies_are_immutable_and_hashable() -> None:
    assert Topology(data=2) == Topology(data=2) and hash(Topology(data=2)) == hash(Topology(data=2))
    with pytest.raises(AttributeError):
        Topology().data = 2  # type: ignore[misc]


def test_examples_run() -> None:
    assert doctest.testmod(topology).failed == 0
