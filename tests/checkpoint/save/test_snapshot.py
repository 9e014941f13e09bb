"""Snapshots: copies in host memory that later steps don't change."""

import torch

from lightning_hanayo.dist_checkpointing.commit import RankPart, TensorPart
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.save import HostBuffers


def part_of(**tensors: torch.Tensor) -> RankPart:
    return RankPart(
        [TensorPart(name, one, tuple(one.shape), Region.whole(one.shape), "model") for name, one in tensors.items()],
        {"state": {"loops": 1}},
    )


def test_a_snapshot_keeps_the_values_while_training_changes_them() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    snapshot = HostBuffers().snapshot(part_of(weight=weight))
    with torch.no_grad():
        weight.zero_()
    copied = snapshot()
    assert copied.tensors[0].tensor.equal(torch.ones(2, 3))
    assert not copied.tensors[0].tensor.requires_grad
    assert copied.texts == {"state": {"loops": 1}}


def test_the_next_snapshot_is_in_the_same_memory_where_shapes_are_equal() -> None:
    buffers = HostBuffers()
    first = buffers.snapshot(part_of(a=torch.zeros(4), b=torch.zeros(2)))()
    second = buffers.snapshot(part_of(a=torch.ones(4), b=torch.ones(3)))()
    same, other = (
        one.tensor.data_ptr() == two.tensor.data_ptr() for one, two in zip(first.tensors, second.tensors, strict=True)
    )
    assert (same, other) == (True, False)
    assert second.tensors[0].tensor.equal(torch.ones(4))


def test_memory_of_tensors_that_are_gone_is_freed() -> None:
    buffers = HostBuffers()
    buffers.snapshot(part_of(a=torch.zeros(4), b=torch.zeros(2)))
    buffers.snapshot(part_of(b=torch.zeros(2)))
    assert sum(one.numel() for one in buffers._buffers.values()) == 2


def test_rows_out_of_order_in_memory_are_copied_in_their_order() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).T
    copied = HostBuffers().snapshot(part_of(a=transposed))().tensors[0].tensor
    assert copied.equal(transposed)
    assert copied.is_contiguous()
