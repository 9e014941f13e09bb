"""The graph: where a stage's autograd graph begins, and what a loss's graph reaches."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_hanayo.runtime.comm.message import Message


class DetachedInputs:
    """The tensors of an arriving message as the beginning of a graph of their own, and the gradients that reach them.

        leaf (arrived) ---> what blocks get: neither a leaf nor a view, so that they may work on it in place

    Args:
        message: nobody else's: its differentiable tensors are leaves, and their `.grad` is the inputs's.
    """

    def __init__(self, message: Message) -> None:
        self._leaves = message.differentiable
        tensors = tuple(alias(t) if t.requires_grad else t for t in message.tensors)
        self.message = Message(message.skeleton, tensors)

    @property
    def gradients(self) -> list[Tensor | None]:
        """Of the message's differentiable tensors."""
        return [leaf.grad for leaf in self._leaves]


_unsafe_view: Any = torch.ops.aten._unsafe_view.default
_CLOCK = torch.empty(0, requires_grad=True)


def alias(leaf: Tensor) -> Tensor:
    """The same values, neither a leaf nor a view: they may be worked on in place."""
    return _unsafe_view(leaf, leaf.shape)  # type: ignore[no-any-return]


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run autograd from those `outputs` that have a gradient."""
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    if not pairs:
        return
    with without_autocast() if _autocasts() else nullcontext():
        # what torch.autograd.backward calls, behind checks of arguments that take longer than a small graph
        torch.autograd.graph._engine_run_backward(
            tuple(o for o, _ in pairs), tuple(g for _, g in pairs), False, False, (),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip


def _autocasts() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@contextmanager
def without_autocast() -> Iterator[None]:
    """A backward runs outside autocast, as Lightning's does: formulas of several operations would be cast again."""
    enabled = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    try:
        for device in enabled:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, was in enabled.items():
            torch.set_autocast_enabled(device, was)


def nodes_of(tensors: Iterable[Tensor]) -> set[Node]:
    """The nodes that made `tensors`, as they are now: an operation in place gives a tensor another one."""
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def reachable(roots: Iterable[Tensor], stop: Iterable[Node] = ()) -> tuple[set[Node], set[Tensor]]:
    """The nodes and the leaves that the graph of `roots` reaches without passing through `stop`."""
    seen: set[Node] = set(stop)
    nodes: set[Node] = set()
    leaves: set[Tensor] = {t for t in roots if t.requires_grad and t.grad_fn is None}
    waiting = [t.grad_fn for t in roots if t.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
        else:
            nodes.add(node)
        waiting.extend(child for child, _ in node.next_functions if child is not None)
    return nodes, leaves


def current_sequence_number() -> int:
    """The calling thread's autograd clock: nodes made before have smaller `_sequence_nr`. 0 without grad mode."""
    node = _CLOCK.view(0).grad_fn
    return node._sequence_nr() if node is not None else 0
