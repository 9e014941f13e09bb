"""Reads a loss's reductions in autograd's graph: means and sums, and where it isn't a mean over samples at all.

    cross_entropy(logits, y) + 0.1 * error.sum() / mask.sum()     terms: a mean over 12 labels, and one over 9
    cross_entropy(logits, y, reduction="sum")                     term: a sum
    mse_loss(a, b).sqrt()                                         coupling: the sqrt of a mean over samples
    cross_entropy(a @ b.T, targets)                               coupling: a product of samples with samples

Nothing is computed or replaced: torch's own nodes have saved their counts. A loss of a custom autograd function,
or of compiled code, shows nothing.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

_MEAN, _SUM = 1, 2
"""torch's numbers for `reduction`"""
_LINEAR = {
    "Add", "Alias", "Cat", "Clone", "Expand", "Neg", "Permute", "ReshapeAlias", "Rsub", "Select", "Squeeze", "Stack",
    "Sub", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
"""operations that keep a mean a mean"""
_CURVED = {
    "Abs", "Clamp", "ClampMax", "ClampMin", "Exp", "LinalgVectorNorm", "Log", "Log10", "Log1P", "Log2", "Logsumexp",
    "Max", "Maximum", "Median", "Min", "Minimum", "Norm", "Pow", "Reciprocal", "Relu", "Rsqrt", "Sigmoid", "Softplus",
    "Sqrt", "Std", "Tanh", "Var",
}  # fmt: skip
"""operations after which a mean is no mean of the same function of micro-batches"""
_LAYERS = {"Addmm", "Convolution", "Embedding", "NativeGroupNorm", "NativeLayerNorm"}
"""operations on samples, where no boundary of the graph says so"""
_LISTS = ("Cat", "Stack")
_NAMES = {"nll_loss": "cross_entropy", "nll_loss2_d": "cross_entropy"}


@dataclass(frozen=True)
class LossTerm:
    """A summand of a loss.

    Args:
        function: its name, such as "cross_entropy" or "mean".
        kind: a "mean" over samples or parts of them, a "sum" over them, or "constant": it doesn't depend on samples.
        count: the number of elements of a mean, or the sum of their class weights; the divisor of a sum, or 1.
        is_loss_function: whether one of torch's loss functions has counted.
    """

    function: str
    kind: Literal["mean", "sum", "constant"]
    count: float | Tensor = 1.0
    is_loss_function: bool = False
    divided: Literal["", "by a product", "by a division"] = ""
    """how a sum is divided by its count: by a product with a number it may as well be weighed"""
    num_rows: int | None = None
    """of the operand of `Tensor.sum`"""


@dataclass(frozen=True)
class LossGraph:
    """The parts of a loss."""

    terms: tuple[LossTerm, ...]
    couplings: tuple[str, ...] = ()
    """why it is no mean over samples, in words"""
    factors: tuple[float, ...] = ()
    """elementwise factors of means over samples: other values if they were computed from samples"""
    pairs: tuple[tuple[float, float], ...] = ()
    """both factors of products that may be of samples with samples: one that is the same for others isn't of samples"""


def read_loss(loss: Tensor, stop: Collection[Node], num_samples: int | None, *, couplings: bool) -> LossGraph:
    """Read the graph of `loss`, a tensor with one element, before its backward.

    Args:
        loss: of a micro-batch.
        stop: the nodes that end the graph of the code after the stack.
        num_samples: of the micro-batch, if they can be counted.
        couplings: whether to look at the whole graph for samples that are compared with each other.
    """
    reader = _Reader(stop, num_samples)
    reader.read(loss.grad_fn)
    found: Iterable[Any] = reader.nodes(loss.grad_fn) if couplings else ()
    pairs = []
    for node in sorted(found, key=lambda one: one._sequence_nr()):  # after the nodes that it uses: these are known then
        if reader.compares_samples(node):
            names = ("self", "mat2") if hasattr(node, "_saved_mat2") else ("x1", "x2")
            first, second = (_summary(getattr(node, f"_saved_{name}", None)) for name in names)
            pairs.append((first, second))
    return LossGraph(tuple(reader.terms), tuple(reader.couplings), tuple(reader.factors), tuple(pairs))


def in_host_memory(graphs: Sequence[LossGraph]) -> list[LossGraph]:
    """The same with numbers in place of counts that are tensors, of which those on one device are copied at once.

    Next to a mean over labels on a GPU there may be a sum with a divisor in host memory.
    """
    counts: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for count in (term.count for graph in graphs for term in graph.terms):
        if isinstance(count, Tensor):
            counts[count.device].append(count)
    numbers: dict[int, float] = {}
    for tensors in counts.values():
        copied = torch.stack([one.double().reshape(()) for one in tensors]).tolist()
        numbers.update(zip(map(id, tensors), copied, strict=True))

    def read(term: LossTerm) -> LossTerm:
        return replace(term, count=numbers[id(term.count)]) if isinstance(term.count, Tensor) else term

    return [replace(graph, terms=tuple(map(read, graph.terms))) for graph in graphs]


class _Reader:
    """Walks from the loss through sums, products with numbers and changes of shape, to the reductions."""

    def __init__(self, stop: Collection[Node], num_samples: int | None) -> None:
        self.terms: list[LossTerm] = []
        self.couplings: dict[str, None] = {}
        self.factors: list[float] = []
        self._stop = set(stop)
        self._num_samples = num_samples
        self._of_samples: set[Node] = set()
        """nodes that are known to be computed from samples"""
        self._reduced: dict[Node, bool] = {}

    def read(self, root: Node | None) -> None:
        waiting: list[_Found] = [(root, None)]
        while waiting:
            node, divisor = waiting.pop()
            if node is not None and node not in self._stop and self._is_reduced(node):
                waiting.extend(self._read_node(node, divisor))

    def _read_node(self, node: Any, divisor: "_Divisor | None") -> "list[_Found]":
        """Add the node's term or coupling; or return the nodes that it is the sum of, with their divisors."""
        operation, children = _operation(node), [child for child, _ in node.next_functions]
        reduction, name = (
            getattr(node, "_saved_reduction", None),
            re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operation).lower(),
        )
        function = _NAMES.get(name, name)
        if not self._is_of_samples(node):
            self.terms.append(LossTerm("a penalty", "constant"))
        elif reduction == _MEAN:
            self.terms.append(LossTerm(function, "mean", _num_counted(node), is_loss_function=True))
        elif reduction == _SUM:
            self.terms.append(_sum(function, divisor, is_loss_function=True))
        elif operation == "Mean" and not self._is_reduced(children[0]):
            self.terms.append(LossTerm("mean", "mean", _num_inputs(node)))
        elif operation == "Sum" and not self._is_reduced(children[0]):
            self.terms.append(_sum("sum", divisor, num_rows=(*_input_shape(node), 1)[0]))
        elif operation in ("Mul", "Div"):
            return self._read_product(node, operation, children, divisor)
        elif operation in _CURVED:
            self.couplings[f"{name} of a mean or sum over samples"] = None
        elif operation in _LINEAR or operation in ("Mean", "Sum"):
            return [(child, divisor) for child in reversed(children)]
        return []

    def _read_product(
        self, node: Any, operation: str, children: list[Node | None], divisor: "_Divisor | None"
    ) -> "list[_Found]":
        of_samples = [child for child in children if child is not None and self._is_of_samples(child)]
        if len(of_samples) > 1 or operation == "Div" and of_samples[0] is not children[0]:
            which = "quotient" if operation == "Div" else "product"
            self.couplings[f"a {which} of means or sums over samples"] = None
            return []
        if len([child for child in children if child is not None]) == 1:  # the other factor has no gradient
            number = node._saved_other if node._saved_other is not None else getattr(node, "_saved_self", None)
            if isinstance(number, Tensor) and number.numel() != 1:
                self.factors.append(_summary(number))
            divisor = _divided(divisor, number, operation)
        return [(of_samples[0], divisor)]

    def _is_reduced(self, node: Node | None) -> bool:
        """Whether its elements are means or sums over samples, or made of such: one number, or one for each class."""
        if node is None or node in self._stop or not node._input_metadata:
            return False
        if node not in self._reduced:
            self._reduced[node] = self._is_scalar(node) or self._is_made_of_reduced(node)
        return self._reduced[node]

    def _is_scalar(self, node: Any) -> bool:
        """Whether it is one number for all samples; of a single sample it may also be that sample's entry."""
        shape = node._input_metadata[0].shape
        return not shape or self._num_samples != 1 and all(size == 1 for size in shape)

    def _is_made_of_reduced(self, node: Any) -> bool:
        operation, children = _operation(node), [child for child, _ in node.next_functions if child is not None]
        if operation in _LISTS:
            return all(map(self._is_scalar, children))
        if operation in ("Mean", "Sum"):  # along the first dimension, where it has all samples
            dims, shape = getattr(node, "_saved_dim", None) or (), _input_shape(node)
            if 0 in dims and shape and self._num_samples and shape[0] % self._num_samples == 0:
                return True
        if operation not in _LINEAR | _CURVED | {"Mul", "Div", "Mean", "Sum"}:
            return False
        of_samples = [child for child in children if self._is_of_samples(child)]
        return bool(of_samples) and all(map(self._is_reduced, of_samples))

    def compares_samples(self, node: Any) -> bool:
        """Whether it is a matrix product, or a table of distances, of samples with samples."""
        operation, children = _operation(node), [child for child, _ in node.next_functions]
        if operation not in ("Bmm", "Mm", "Cdist", "EuclideanDist") or len(children) != 2:
            return False
        if operation == "Bmm":  # only with one matrix, whose rows and columns are samples: an einsum
            first, *sizes = node._input_metadata[0].shape
            samples = self._num_samples
            if first != 1 or samples is None or any(n != samples and (samples <= 1 or n % samples) for n in sizes):
                return False
        return all(child is not None and self._is_of_samples(child) for child in children)

    def nodes(self, root: Node | None) -> Iterable[Node]:
        """The whole graph, from `root` to where it stops."""
        seen, waiting = set(self._stop), [root]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                yield node
                waiting.extend(child for child, _ in node.next_functions)

    def _is_of_samples(self, root: Node) -> bool:
        """Whether it is computed from samples, and not from parameters alone."""
        if root in self._stop or root in self._of_samples or any(map(self._is_sample, self.nodes(root))):
            self._of_samples.add(root)
            return True
        return False

    def _is_sample(self, node: Any) -> bool:
        if any(child in self._stop or child in self._of_samples for child, _ in node.next_functions):
            return True
        return _operation(node) in _LAYERS or hasattr(node, "_saved_reduction")


@dataclass(frozen=True)
class _Divisor:
    """The divisor of a sum."""

    value: float | Tensor
    by_division: bool
    """otherwise by a product with a number: often a weight in the loss, and no count"""


_Found = tuple[Node | None, _Divisor | None]
"""A node yet to be read, and its divisor."""


def _num_counted(node: Any) -> float | Tensor:
    """How many elements a loss function has averaged: those that aren't ignored, or the sum of their class weights."""
    if not hasattr(node, "_saved_total_weight"):
        return _num_inputs(node)
    if node._saved_weight is not None:
        return node._saved_total_weight.detach()  # type: ignore[no-any-return]
    ignored = node._saved_ignore_index
    ignored -= 2**64 if ignored >= 2**63 else 0  # torch shows the signed number as an unsigned one
    return (node._saved_target != ignored).sum()  # type: ignore[no-any-return]


def _sum(function: str, divisor: _Divisor | None, **known: Any) -> LossTerm:
    if divisor is None:
        return LossTerm(function, "sum", **known)
    how: Any = "by a division" if divisor.by_division else "by a product"
    return LossTerm(function, "sum", divisor.value, divided=how, **known)


def _summary(tensor: Tensor | None) -> float:
    """A number that tells tensors apart: features of norm 1, fractions that sum to 1, and other orders of the same."""
    if tensor is None:
        return math.nan
    values = tensor.detach().double().flatten() + 0.5
    return float((values.square() * torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device)).sum())


def _divided(before: _Divisor | None, number: Any, operation: str) -> _Divisor | None:
    """The divisor of a term, once this product with a number is taken into account."""
    if number is None or isinstance(number, Tensor) and number.numel() != 1:
        return before
    value: Any = number.detach() if isinstance(number, Tensor) else number
    if operation == "Div":
        return _Divisor(before.value * value if before is not None and before.by_division else value, by_division=True)
    return before or _Divisor(1.0 / torch.as_tensor(value), by_division=False)


def _input_shape(node: Any) -> tuple[int, ...]:
    """The shape of its operand, as the node that has made that knows."""
    child, index = next(pair for pair in node.next_functions if pair[0] is not None)
    return tuple(child._input_metadata[index].shape)


def _num_inputs(node: Any) -> float:
    count = 1.0
    for size in _input_shape(node):
        count *= size
    return count


def _operation(node: Node) -> str:
    """Its name, such as "NllLoss2D"."""
    return _operation_of(node.name())


@cache
def _operation_of(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)
