"""The boundary of a stage's autograd graph: its begin and its end, its backward, and its nodes.

Recomputation: modules keep their inputs alone, and run again in the backward.

    F    block(x)          keeps x
    I    block(x) again    keeps tensors for its backward, which runs at once; the queue keeps those for `W`
    W                      nothing runs again

It is torch's non-reentrant checkpoint around the module's `forward`, on the instance: names, parameters, class and repr
stay as they are. Random numbers are those of the first run, whose generators' states are kept, and so are the values
that it makes `once`. Key/value caches, lists and dictionaries among the arguments, which the first run fills, are for
the second one as they were before.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.made_once import MadeOnce
from lightning_hanayo.pipeline_parallel.p2p import Message
from lightning_hanayo.pipeline_parallel.pytree import is_cache
from lightning_hanayo.versions import identity_of


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
    # torch.autograd.backward calls this after checks of its arguments, which take longer than a small graph
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


_ORIGINAL = "_forward_that_is_recomputed"
WAY_OUT = "Leave the block out: recompute=lambda name, block: ..., which says whether a block is recomputed."


def recompute(modules: Iterable[nn.Module]) -> None:
    """Let these modules keep their inputs alone, from now on."""
    for module in modules:
        if _ORIGINAL not in vars(module):
            object.__setattr__(module, _ORIGINAL, vars(module).get("forward"))
            object.__setattr__(module, "forward", MethodType(forward, module))


def stop_recomputing(modules: Iterable[nn.Module]) -> None:
    """Give the modules, and those inside them, their own `forward` back."""
    for module in (part for one in modules for part in one.modules()):
        if _ORIGINAL in vars(module):
            original = vars(module).pop(_ORIGINAL)
            del vars(module)["forward"]
            if original is not None:
                object.__setattr__(module, "forward", original)


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the module's forward. A function of this module, so that pickle finds it by name.

    Raises:
        UnsupportedError: it changes a buffer, which would change twice.
    """
    original = vars(module)[_ORIGINAL] or partial(type(module).forward, module)
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        return checkpoint(original, *args, use_reentrant=False, **kwargs)
    before = _versions(module)
    made = checkpoint(_Runs(original, args, kwargs), use_reentrant=False)
    changed = [name for name, version in _versions(module).items() if before.get(name) != version]
    if changed:
        raise UnsupportedError(
            f"recompute runs a {type(module).__name__} again in the backward, but its forward changes the buffer "
            f"{changed[0]}, which would change twice. {WAY_OUT}"
        )
    return made


class _Runs:
    """A call that is made first with its arguments, and then with caches and containers as they were before."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function = function
        self._first: Any = (args, kwargs)
        self._again = tree_map(as_now, (args, kwargs), is_leaf=is_cache)
        self._made = MadeOnce()

    def __call__(self) -> Any:
        (args, kwargs), self._first = self._first or tree_map(as_now, self._again, is_leaf=is_cache), None
        with self._made.running():
            return self._function(*args, **kwargs)


def as_now(value: Any) -> Any:
    """A copy of a cache or a UserDict, with its content of now; anything else itself."""
    if not is_cache(value):
        return copy.copy(value) if isinstance(value, UserDict) else value
    copied = copy.copy(value)
    for name, part in vars(value).items():
        if isinstance(part, list):
            vars(copied)[name] = [copy.copy(layer) for layer in part]
        elif isinstance(part, dict):
            vars(copied)[name] = dict(part)
        else:
            vars(copied)[name] = as_now(part)
    return copied


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor each buffer is, and how often it was written."""
    return {name: identity_of(buffer) for name, buffer in module.named_buffers()}


def attention_of(block: nn.Module) -> list[nn.Module]:
    """The outermost modules inside a block whose class, or one that it derives from, is named after attention."""
    found: list[nn.Module] = []
    for module in block.children():
        if any("Attention" in kind.__name__ for kind in type(module).__mro__):
            found.append(module)
        else:
            found += attention_of(module)
    return found
