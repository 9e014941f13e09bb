"""The message: what one stage sends to the next or the previous one, as a structure and a list of tensors; its key."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from lightning_hanayo.runtime.comm.pytree import Skeleton


class MessageKey(NamedTuple):
    """One message of a batch: between `stage` and the next one, forward (activations) or backward (gradients)."""

    stage: int
    direction: Literal["forward", "backward"]
    microbatch: int

    @property
    def tag(self) -> int:
        """Differs between all messages of a batch. The next number is the tag of a changed spec and its payload."""
        return 2 + 2 * (2 * (self.stage << 16 | self.microbatch) + (self.direction == "backward"))

    def __str__(self) -> str:
        value = "activation of stage" if self.direction == "forward" else "gradient for the output of stage"
        return f"the {value} {self.stage}, micro-batch {self.microbatch}"


class Message(NamedTuple):
    """A flattened tree. `skeleton` is hashable and holds plain values only, so two ranks can agree on it once."""

    skeleton: Skeleton
    tensors: tuple[Tensor, ...]

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that get a gradient, in the order in which the gradients come back."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def detached(self) -> "Message":
        """The same message outside the graph that made it, as if it had been received. Memory is shared."""
        tensors = (t.detach().requires_grad_() if t.requires_grad else t for t in self.tensors)
        return Message(self.skeleton, tuple(tensors))


def gradient_message(gradients: Sequence[Tensor | None]) -> Message:
    """A message with the gradients of another one's `differentiable` tensors; None where there is no gradient."""
    present = [gradient is not None for gradient in gradients]
    return Message(("gradients", *present), tuple([gradient for gradient in gradients if gradient is not None]))


def unpack_gradients(message: Message) -> list[Tensor | None]:
    """The gradients that `gradient_message` was given."""
    gradients = iter(message.tensors)
    return [next(gradients) if present else None for present in message.skeleton[1:]]
