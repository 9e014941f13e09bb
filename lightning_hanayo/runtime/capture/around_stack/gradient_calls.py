"""Checks calls of autograd in the user's step: a gradient can't pass the stack while the step runs.

    grad(penalty(x), x)             before the stack, or after it: computed here
    grad(head(stack(x)), x)         refused: the blocks' graphs are on other ranks
    loss.backward()                 refused: the pipeline runs the backward of all stages

torch.autograd.grad and backward both call `torch.autograd._engine_run_backward`, which is replaced while user code
runs. Nothing else runs then: the main thread waits for the step.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_leaves

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.autograd import graph_boundary
from lightning_hanayo.runtime.capture.proxy import user_line
from lightning_hanayo.runtime.capture.suspended_call import current_tracer

_autograd: Any = torch.autograd


class GradientCalls:
    """Checks the calls of one rank's steps, and warns once. The stack has these `blocks`."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._has_warned = False

    @contextmanager
    def checked(self, *, cuts_batch: bool, trains: bool) -> Iterator[None]:
        """Entered while user code runs; `cuts_batch` says whether it runs on a part of a batch, `trains` in which step.

        In a pass without gradients of a training step the main thread's grad mode is off.
        """
        run: Callable[..., Any] = _autograd.graph._engine_run_backward
        main = threading.current_thread()

        def check(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not main and current_tracer() is None:  # not the user's code
                return run(outputs, *args, **kwargs)
            inputs = args[3] if len(args) > 3 else ()
            accumulates = trains and bool(kwargs.get("accumulate_grad"))
            self._check(_with_edges(outputs), _with_edges(inputs), accumulates=accumulates, cuts_batch=cuts_batch)
            return run(outputs, *args, **kwargs)

        _autograd._engine_run_backward = check
        try:
            yield
        finally:
            _autograd._engine_run_backward = run

    def _check(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, accumulates: bool, cuts_batch: bool
    ) -> None:
        """Check a call of the engine.

        Raises:
            UnsupportedError: a gradient would have to pass the stack, or be added to all parameters.
        """
        tracer = current_tracer()
        if accumulates and not inputs:
            _refuse(
                "calls backward()",
                "but the pipeline runs the backward of all blocks and micro-batches",
                "Return the loss, whose backward the pipeline runs; for gradients that the step itself needs there is "
                "torch.autograd.grad",
            )
        if tracer is not None and self._passes_stack(outputs, inputs, tracer):
            _refuse(
                "computes a gradient through the stack (torch.autograd.grad)",
                "but the blocks of the stack run on several ranks",
                "Take it with respect to the stack's output or to what comes after it, do it inside a block, or set "
                "pipeline_parallel_size=1, num_waves=1 and cube=1, where the step runs in one piece",
            )
        if cuts_batch and not self._has_warned and _depends_on_other_samples(outputs, inputs):
            self._has_warned = True
            warnings.warn(
                f"{user_line()} computes a gradient inside the step (torch.autograd.grad), which is that of a "
                f"micro-batch: of a sum over its samples, or with respect to a parameter. The training equals one "
                f"process that runs the same micro-batches. Set num_microbatches=1 if it must be that of the batch.",
                stacklevel=2,
            )

    def _passes_stack(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tracer: Any) -> bool:
        """Whether outputs come from what the stack has returned, and inputs are in front of it or in it."""
        nodes, _ = graph_boundary.reachable(outputs)
        received = (leaf for leaf in tree_leaves(tracer.received) if isinstance(leaf, Tensor))
        if nodes.isdisjoint(graph_boundary.nodes_of(received)):
            return False
        before, leaves = graph_boundary.reachable(tracer.sent)
        leaves |= {parameter for block in self._blocks for parameter in block.parameters()}
        return any(one in leaves if one.grad_fn is None else one.grad_fn in before for one in inputs)


class _Edge(NamedTuple):
    """A `GradientEdge` that a step has passed instead of a tensor, with what is asked of tensors here."""

    grad_fn: Node
    requires_grad: bool = True

    def dim(self) -> int:
        """Of a tensor with this gradient, as far as is known."""
        return 0


def _with_edges(values: Sequence[Any]) -> list[Any]:
    return [_Edge(one.node) if isinstance(one, GradientEdge) else one for one in values]


def _depends_on_other_samples(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether the gradient of a micro-batch is another than the batch's: not so for one of each sample's own output."""
    sums = (one.dim() > 0 or type(one.grad_fn).__name__.startswith("SumBackward") for one in outputs)
    return any(isinstance(one, nn.Parameter) for one in inputs) or not all(sums)


def _refuse(what: str, why: str, way_out: str) -> NoReturn:
    raise UnsupportedError(f"{user_line()} {what}, {why}. {way_out}.")
