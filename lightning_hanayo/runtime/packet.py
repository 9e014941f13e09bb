"""The packet: what a stage hands to the next one, or a gradient to the one before: a skeleton and its tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_hanayo.runtime.tree import Skeleton


@dataclass(frozen=True)
class Packet:
    """A tree taken apart. `skeleton` is hashable and plain, so that two ranks can agree on it once."""

    skeleton: Skeleton
    tensors: tuple[Tensor, ...]

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors a gradient comes back for, in the order in which it comes."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def detached(self) -> "Packet":
        """The packet as it would arrive by mail: outside the graph that made it. Memory is shared."""
        tensors = (t.detach().requires_grad_() if t.requires_grad else t for t in self.tensors)
        return Packet(self.skeleton, tuple(tensors))


def gradients(tensors: Sequence[Tensor | None]) -> Packet:
    """The gradients of another packet's `differentiable` tensors; None where there is none."""
    present = tuple(tensor is not None for tensor in tensors)
    return Packet(("gradients", *present), tuple(tensor for tensor in tensors if tensor is not None))


def spread(packet: Packet) -> list[Tensor | None]:
    """What `gradients` was given."""
    found = iter(packet.tensors)
    return [next(found) if present else None for present in packet.skeleton[1:]]
