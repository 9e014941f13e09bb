"""Gathers trees of tensors from all pipeline ranks onto rank 0, in CPU memory."""

from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.runtime.comm.codec import Spec, spec_of
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.comm.pytree import Flattener, Skeleton, unflatten
from lightning_hanayo.runtime.comm.transport import Transport

_TAG = 1


def gather(transport: Transport, tree: Any) -> list[Any] | None:
    """Rank 0 gets every rank's `tree`, in rank order; the others get None. Called by all ranks of the pipeline.

    A tree consists of tensors and plain values in dicts, lists and tuples. Tensors are sent one at a time.
    """
    if transport.rank > 0:
        _send(transport, tree)
        return None
    return [unflatten(*_flatten(tree)), *(_receive(transport, rank) for rank in range(1, transport.num_ranks))]


def _send(transport: Transport, tree: Any) -> None:
    """Send the length of the encoded spec, the spec, and each tensor's bytes, to rank 0."""
    skeleton, tensors = _flatten(tree)
    spec = torch.frombuffer(bytearray(spec_of(Message(skeleton, tuple(tensors))).to_bytes()), dtype=torch.uint8)
    for buffer in (torch.tensor([spec.numel()]), spec, *tensors):
        if buffer.numel():
            transport.send(0, _TAG, _as_bytes(buffer)).wait()


def _receive(transport: Transport, rank: int) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    transport.receive(rank, _TAG, _as_bytes(length)).wait()
    encoded = torch.empty(int(length), dtype=torch.uint8)
    transport.receive(rank, _TAG, encoded).wait()
    spec = Spec.from_bytes(encoded.numpy().tobytes())
    tensors = spec.empty()
    for tensor in tensors:
        if tensor.numel():
            transport.receive(rank, _TAG, _as_bytes(tensor)).wait()
    return unflatten(spec.skeleton, tensors)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _flatten(tree: Any) -> tuple[Skeleton, list[Tensor]]:
    """The tree's skeleton, and its tensors in CPU memory."""
    flattener = Flattener()
    return flattener.flatten(tree, "state"), [tensor.detach().cpu() for tensor in flattener.tensors]
