"""The packet: what a stage hands to the next one, or a gradient to the one before: a skeleton and its tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_hanayo.runtime.comm.pytree import Skeleton


@dataclass(frozen=True)
class Message:
    """A tree taken apart. `skeleton` is hashable and plain, so that two ranks can agree on it once."""

    skeleton: Skeleton
    tensors: tuple[Tensor, ...]

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors a gradient comes back for, in the order in which it comes."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def detached(self) -> "Message":
        """The packet as it would arrive by mail: outside the graph that made it. Memory is shared."""
        tensors = (t.detach().requires_grad_() if t.requires_grad else t for t in self.tensors)
        return Message(self.skeleton, tuple(tensors))


def gradients(tensors: Sequence[Tensor | None]) -> Message:
    """The gradients of another packet's `differentiable` tensors; None where there is none."""
    present = tuple(tensor is not None for tensor in tensors)
    return Message(("gradients", *present), tuple(tensor for tensor in tensors if tensor is not None))


def spread(packet: Message) -> list[Tensor | None]:
    """What `gradients` was given."""
    found = iter(packet.tensors)
    return [next(found) if present else None for present in packet.skeleton[1:]]
