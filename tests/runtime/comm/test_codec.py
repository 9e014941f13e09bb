"""A message packed into a buffer of bytes is the same message when it is unpacked.

buffer   | tensor 0 | . . | tensor 1 | ... | 64 B header       tensors begin at multiples of 256 B
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from lightning_hanayo.pipeline_parallel.p2p import (
    ALIGN,
    HEADER,
    Message,
    SendBuffer,
    Spec,
    gradient_message,
    header,
    set_header,
    spec_of,
    unpack,
    unpack_gradients,
)
from lightning_hanayo.pipeline_parallel.pytree import Flattener, unflatten

CPU = torch.device("cpu")


def packed(message: Message) -> Tensor:
    send_buffer = SendBuffer(spec_of(message), CPU)
    send_buffer.fill(message.tensors)
    return send_buffer.buffer


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip
SHAPES = some.lists(some.integers(0, 5), max_size=3).map(tuple)


@some.composite
def tensors(draw: some.DrawFn) -> Tensor:
    tensor = (torch.randn(draw(SHAPES)) * 3).to(draw(some.sampled_from(DTYPES)))
    if tensor.ndim > 1 and draw(some.booleans()):
        tensor = tensor.transpose(0, -1)  # not contiguous
    return tensor.requires_grad_(tensor.is_floating_point() and draw(some.booleans()))


@given(some.lists(tensors(), max_size=4))
def test_round_trip(values: list[Tensor]) -> None:
    message = Message(("tuple", *(("tensor", i) for i in range(len(values)))), tuple(values))
    spec = spec_of(message)
    assert spec.matches(message)
    buffer = packed(message)
    arrived = unpack(Spec.from_bytes(spec.to_bytes()), buffer)
    assert all(start % ALIGN == 0 for start, _ in spec.extents) and buffer.nbytes == spec.num_bytes
    assert not values or spec.extents[0][0] == 0
    assert arrived.skeleton == message.skeleton
    for ours, theirs in zip(arrived.tensors, values, strict=True):
        assert (ours.dtype, ours.shape, ours.requires_grad) == (theirs.dtype, theirs.shape, theirs.requires_grad)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tree", [(True, 1, 1.0), {"a": None, 2: ["x", float("inf")]}, (torch.Size([2]), torch.int8)])
def test_spec_as_json(tree: object) -> None:
    spec = Spec.of(Flattener().flatten(tree), (("bfloat16", (2, 3), True), ("bool", (), False)))
    arrived = Spec.from_bytes(spec.to_bytes())
    assert arrived is spec  # so that messages that are alike share buffers
    assert repr(unflatten(arrived.skeleton, [])) == repr(tree)


def test_header_holds_the_length_of_what_follows() -> None:
    buffer = packed(Message(("tuple",), ()))
    assert (buffer.nbytes, header(buffer)) == (HEADER, 0)
    set_header(buffer, 12345)
    assert header(buffer) == 12345


def test_a_change_in_place_of_one_tensor_does_not_touch_the_others() -> None:
    """x.add_(1) after y * w: autograd would refuse the backward if x and w counted their versions together."""
    message = Message(("tuple", ("tensor", 0), ("tensor", 1)), (torch.ones(2), torch.ones(2, requires_grad=True)))
    x, w = unpack(spec_of(message), packed(message)).tensors
    product = torch.full((2,), 3.0, requires_grad=True) * w
    x.add_(1)
    product.sum().backward()
    assert torch.equal(w.grad, torch.full((2,), 3.0))


def test_gradients_keep_their_order() -> None:
    given = [torch.ones(1), None, torch.zeros(2)]
    assert [g is t for g, t in zip(unpack_gradients(gradient_message(given)), given, strict=True)] == [True] * 3
    assert unpack_gradients(gradient_message([])) == []


CHANGES = {
    "shape": (torch.ones(3), "x"),
    "dtype": (torch.ones(2, dtype=torch.float64), "x"),
    "gradient": (torch.ones(2, requires_grad=True), "x"),
    "plain value": (torch.ones(2), "y"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_spec_matches_nothing_else(change: str) -> None:
    first, other = (
        Message(("tuple", ("tensor", 0), ("plain", "str", text)), (tensor,))
        for tensor, text in ((torch.ones(2), "x"), CHANGES[change])
    )
    assert spec_of(first).matches(first)
    assert not spec_of(first).matches(other)


def test_a_send_buffer_is_filled_again() -> None:
    send_buffer = SendBuffer(spec_of(Message(("tensor", 0), (torch.zeros(2),))), CPU)
    for value in (1.0, 2.0):
        send_buffer.fill([torch.full((2,), value)])
        (arrived,) = unpack(send_buffer.spec, send_buffer.buffer.clone()).tensors
        assert torch.equal(arrived, torch.full((2,), value))
