"""The boundary of a stage's autograd graph: its begin and its end, its backward, and its nodes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from lightning_hanayo.pipeline_parallel.message import Message


class DetachedInputs:
    """The tensors of a received message as the beginning of a new graph, and the gradients that reach them.

        leaf (received) ---> argument of blocks: neither a leaf nor a view, so that they may change it in place

    Nothing else may use the message. Its differentiable tensors are leaves, whose `.grad` belongs to this object.
    """

    def __init__(self, message: Message) -> None:
        self._leaves = message.differentiable
        self.message = Message(message.skeleton, tuple([alias(t) if t.requires_grad else t for t in message.tensors]))

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients of the message's differentiable tensors."""
        return [leaf.grad for leaf in self._leaves]


class GraphCut:
    """Cuts autograd's graph: tensors of the earlier part, and the leaves of the later part that stand for them."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self.nodes: list[Node] = []
        """those with which the later part begins"""

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the same values in the later part; for the same tensor always from the same leaf."""
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._pairs:
            self._pairs[id(tensor)] = tensor, tensor.detach().requires_grad_()
        later = alias(self._pairs[id(tensor)][1])
        if later.grad_fn is not None:  # not in grad mode
            self.nodes.append(later.grad_fn)
        return later

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that were cut, in the earlier part."""
        return [tensor for tensor, _ in self._pairs.values()]

    def backward(self, *, always: bool = False, retain_graph: bool = False) -> None:
        """Run the earlier part's backward, with the later part's gradients; `always`: zeros where one is missing."""
        leaves = [leaf for _, leaf in self._pairs.values()]
        gradients = [torch.zeros_like(leaf) if always and leaf.grad is None else leaf.grad for leaf in leaves]
        run_backward(self.tensors, gradients, retain_graph=retain_graph)


_unsafe_view: Any = torch.ops.aten._unsafe_view.default
_PROBE = torch.empty(0, requires_grad=True)


def alias(leaf: Tensor) -> Tensor:
    """The same values, as neither a leaf nor a view: they may be changed in place."""
    return _unsafe_view(leaf, leaf.shape)  # type: ignore[no-any-return]


def edges_of(outputs: Sequence[Tensor]) -> list[GradientEdge]:
    """Where the gradients of `outputs`, which all require one, enter the graph. They keep the graph, not the outputs.

    A leaf has no node, and that of an `autograd.Function` doesn't own the graph (torch 2.10). Then all outputs get
    views, whose nodes save sizes only: autograd runs them first, so gradients are added in the same order either way.
    """
    edges = []
    for output in outputs:
        if (node := output.grad_fn) is None or issubclass(type(node), BackwardCFunction):
            break
        edges.append(GradientEdge(node, output.output_nr))
    else:
        return edges
    with torch.enable_grad():
        nodes = [output.view_as(output).grad_fn for output in outputs]
    return [GradientEdge(node, 0) for node in nodes if node is not None]


def run_backward(
    outputs: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None], *, retain_graph: bool = False
) -> None:
    """Run autograd's backward from the `outputs` that have a gradient."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        with without_autocast():
            run_backward(outputs, gradients, retain_graph=retain_graph)
        return
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    if not pairs:
        return
    # torch.autograd.backward calls this after checks of its arguments, which take longer than a small graph.
    # In the calling thread: to hand each entry over to a device's thread takes up to 0.2 ms of a GPU's host.
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.graph._engine_run_backward(
            *zip(*pairs, strict=True), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
        )


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast for a backward, as Lightning does: autocast would cast inside backward formulas again."""
    enabled = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    try:
        for device in enabled:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, was in enabled.items():
            torch.set_autocast_enabled(device, was)


def reachable(roots: Iterable[Tensor | GradientEdge], stop: Iterable[Node] = ()) -> tuple[set[Node], set[Tensor]]:
    """The nodes and the leaves that the graph of `roots` reaches without passing through `stop`."""
    seen: set[Node] = set(stop)
    nodes: set[Node] = set()
    leaves: set[Tensor] = set()
    waiting: list[Node] = []
    for root in roots:
        if isinstance(root, GradientEdge):
            waiting.append(root.node)
        elif root.grad_fn is not None:
            waiting.append(root.grad_fn)
        elif root.requires_grad:
            leaves.add(root)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
        else:
            nodes.add(node)
        waiting += [child for child, _ in node.next_functions if child is not None]
    return nodes, leaves


def foreign_functions(roots: Iterable[Tensor]) -> list[Any]:
    """The nodes in the graph of `roots` whose `autograd.Function` is neither torch's nor of this package."""
    nodes: list[Any] = [node for node in reachable(roots)[0] if issubclass(type(node), BackwardCFunction)]
    own = ("torch", "lightning_hanayo")
    return [node for node in nodes if node._forward_cls.__module__.partition(".")[0] not in own]


def current_sequence_number() -> int:
    """The calling thread's next autograd sequence number: earlier nodes have smaller ones. 0 without grad mode."""
    node = _PROBE.view(0).grad_fn
    return node._sequence_nr() if node is not None else 0
