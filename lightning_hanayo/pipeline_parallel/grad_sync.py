"""Sums a stage's gradients over the data ranks, beginning as soon as the stage has finished its backward.

    scattered ones     if the optimizer is sharded: each data rank gets the sums that it needs, by a reduce-scatter
    large gradients    each is reduced in place, by an all-reduce of its own
    small ones         | is there a gradient of p0? | of p1? | ... | p3's | p5's | ...      one all-reduce per dtype
    sparse ones        rows are exchanged: two all-reduces each

The all-reduces overlap with the computation, and nothing is waited for before the step's end. A parameter that one data
rank used and another did not gets the sum on both. A parameter that no rank used gets no gradient.

Also in this file: gradients of tied parameters, and gradients between the training step and Lightning's backward.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, field
from itertools import compress, groupby
from math import inf
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.monitor.waiting import Waiting
from lightning_hanayo.overlap.link_queue import Work
from lightning_hanayo.weight_gradients import gradient_dtype

GroupOf = Callable[[nn.Parameter], dist.ProcessGroup | None]


class Scatter(Protocol):
    """Sums of which each data rank needs only its own part."""

    def sums(self, parameter: nn.Parameter, group: dist.ProcessGroup) -> bool:
        """Whether it sums the gradient of this parameter over this group."""

    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Work:
        """Start to sum gradients, in place. Called by all data ranks."""


LARGE = 2**18
"""bytes from which a gradient gets its own all-reduce: gloo copies others into one buffer and back, which takes about
as long for a quarter of a megabyte as starting another all-reduce"""


def sparse_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights whose gradients are sparse, by the name of their module."""
    return {
        name: part.weight
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }


@dataclass(frozen=True)
class _Bucket:
    """Gradients of one dtype under way: each parameter's sum, and `counts`, [parameters]: how many ranks have one."""

    parameters: Sequence[nn.Parameter]
    sums: Sequence[Tensor]
    counts: Tensor
    works: Sequence[Work]
    ranks: Sequence[int]


class GradientAllReduce:
    """Sums gradients over ranks.

    Args:
        parameters: each stage's own parameters; the first stage's include those outside the stack.
        group: the ranks that have the same stages and other data; None if there is only one. Or a function that
            returns the group for each parameter.
        sparse: those whose gradients are sparse, on all ranks, such as the weight of `nn.Embedding(sparse=True)`.
        scatter: sums those of which each rank needs a part; None: all ranks need all sums.
    """

    def __init__(
        self,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        group: dist.ProcessGroup | GroupOf | None,
        sparse: Collection[Tensor] = (),
        scatter: Scatter | None = None,
    ) -> None:
        self._scatter = scatter
        self._sparse = frozenset(sparse)
        self._groups: dict[int, dict[dist.ProcessGroup, list[nn.Parameter]]] = {}
        for stage, own in parameters.items():
            groups = self._groups[stage] = {}
            for parameter in own:
                among = group(parameter) if callable(group) else group
                if among is not None:
                    groups.setdefault(among, []).append(parameter)
        self._under_way: list[_Bucket] = []

    @property
    def has_no_peers(self) -> bool:
        """Whether there is no other rank to sum with."""
        return not any(self._groups.values())

    def start(self, stage: int) -> None:
        """Start to sum the gradients of `stage`. Do not touch them before `finish()` returns.

        Called by all data ranks, for their stages in the same order.
        """
        for group, trained in self._groups[stage].items():
            needed = [parameter for parameter in trained if parameter.requires_grad]
            others = [parameter for parameter in needed if parameter not in self._sparse]
            ranks = tuple(dist.get_process_group_ranks(group))
            for parameter in [parameter for parameter in needed if parameter in self._sparse]:
                dtype, gradient = gradient_dtype(parameter), parameter.grad
                if gradient is None:
                    total = torch.zeros_like(parameter, dtype=dtype).to_sparse(1)
                else:  # where the weight is used in another way, too, autograd gives all rows
                    total = parameter.grad = gradient if gradient.is_sparse else gradient.to_sparse(1)
                counts = parameter.new_full((1,), float(gradient is not None), dtype=dtype)
                works = [group.allreduce([counts]), group.allreduce([total])]
                self._under_way.append(_Bucket([parameter], [total], counts, works, ranks))
            ordered = sorted(others, key=lambda p: str(gradient_dtype(p)))
            for _, parameters in groupby(ordered, key=gradient_dtype):
                self._under_way.append(_start(list(parameters), group, self._scatter))

    def finish(self) -> None:
        """Wait for all sums, and put them into `.grad`, also where only another rank has a gradient."""
        for bucket in self._under_way:
            with Waiting("the sum of gradients over the data ranks", bucket.ranks):
                for work in bucket.works:
                    work.wait()
            missing = [i for i, parameter in enumerate(bucket.parameters) if parameter.grad is None]
            counts = bucket.counts.tolist() if missing else ()  # on CUDA this waits, so it is done only if needed
            for i in missing:
                if counts[i]:
                    bucket.parameters[i].grad = bucket.sums[i]
        self._under_way.clear()

    def forget(self) -> None:
        """After a failure: drop the groups. Transfers under way stay until they are left.

        gloo sends messages of several operations through one connection. If a buffer went while its message arrives, an
        all-reduce behind it would never end, and with it the process group.
        """
        self._groups.clear()

    def drop_transfers(self) -> None:
        """After a failure, when the groups have been left: free the transfers."""
        self._under_way.clear()


def _start(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, scatter: Scatter | None) -> _Bucket:
    counts = parameters[0].new_ones(len(parameters), dtype=gradient_dtype(parameters[0]))
    for i, parameter in enumerate(parameters):
        if parameter.grad is None:
            counts[i].zero_()  # on the device: copying a list of numbers there would wait
    taken: set[int] = set()
    sums = [_summand(parameter, taken) for parameter in parameters]
    # NCCL reduces any number of tensors in place in one launch.
    large = LARGE if dist.get_backend(group) == "gloo" else inf
    is_scattered = [scatter is not None and scatter.sums(parameter, group) for parameter in parameters]
    alike = [total for total, scattered in zip(sums, is_scattered, strict=True) if not scattered]
    together = [total for total in alike if total.nbytes < large]
    works: list[Work] = [group.allreduce([total]) for total in alike if total.nbytes >= large]
    if scatter is not None and any(is_scattered):
        works.append(scatter.reduce_scatter(list(compress(sums, is_scattered))))
    works.append(group.allreduce_coalesced([counts, *together]))
    return _Bucket(parameters, sums, counts, works, tuple(dist.get_process_group_ranks(group)))


def _summand(parameter: nn.Parameter, taken: set[int]) -> Tensor:
    """The parameter's gradient, or zeros, with the parameter's strides, which are the same on all ranks.

    Its memory is not in `taken`: autograd gives `p` and `q` of `x + p.view(...) + q.view(...)` the same memory.
    """
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    if gradient.is_sparse:
        raise UnsupportedError(
            f"a parameter of shape {list(parameter.shape)} has a sparse gradient. With several data ranks only weights "
            f"of nn.Embedding and nn.EmbeddingBag with sparse=True may have one, which is known beforehand."
        )
    memory = gradient.untyped_storage().data_ptr()
    if gradient.stride() != parameter.stride() or memory in taken:
        gradient = parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    taken.add(memory)
    return gradient


class TiedGradients:
    """Adds the gradients of tied parameters, which code before the stack and the loss both use, in autograd's order.

        one process    grad += (head's + embedding's)         for micro-batch 0, then 1, then 2, ...
        a pipeline     head's of 0, head's of 1, embedding's of 0, ...     so the head's part waits for the embedding's

    In any other order the sum would differ in its last bits. A part, as large as the parameter, is kept from the loss's
    backward until the backward of the first stage. Where that is too much memory, it isn't `in_order`: parts are added
    at once, in a pipeline's order.
    """

    def __init__(self, *, in_order: bool = True) -> None:
        self._in_order = in_order
        self._parts: dict[int, dict[Tensor, Tensor]] = {}

    def begin_batch(self) -> None:
        """Forget parts of the batch before."""
        self._parts.clear()

    def loss_backward(self, microbatch: int, parameters: Collection[Tensor], backward: Callable[[], None]) -> None:
        """Run the loss's `backward`, and set aside its gradients of `parameters`, if an order is kept."""
        if not self._in_order or not parameters:
            backward()
            return
        with _separately(parameters) as part:
            backward()
        self._parts[microbatch] = part

    def first_stage_backward(self, microbatch: int, backward: Callable[[], None]) -> None:
        """Run the first stage's `backward`, and add both parts to `.grad` at once."""
        part = self._parts.pop(microbatch, {})
        with _separately(part) as own:
            backward()
        for parameter, gradient in part.items():
            total = gradient + own[parameter] if parameter in own else gradient
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)


@contextmanager
def _separately(parameters: Iterable[Tensor]) -> Iterator[dict[Tensor, Tensor]]:
    """Collect the gradients that are made inside, and leave `.grad` as it was."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = None
    made: dict[Tensor, Tensor] = {}
    yield made
    for parameter, gradient in before.items():
        if parameter.grad is not None:
            made[parameter] = parameter.grad
        parameter.grad = gradient


@dataclass(eq=False, repr=False)
class DeferredGradients:
    """The gradients of one batch, between `training_step` and `backward`.

        Lightning    training_step -> zero_grad -> backward -> clip -> step
        pipeline      F F B B ...                  set .grad

    Lightning zeroes gradients after the training step. So the step stashes its gradients, and puts back the old ones.

    While batches accumulate, new gradients are added to the old ones as they are made. If Lightning's backward then
    sends an unexpected factor, it is too late to multiply only the new ones. So where the user's code may send one, the
    new gradients are kept separate, and added to the old ones when the factor is known.
    """

    parameters: Sequence[nn.Parameter]
    """all that this rank trains"""
    _: KW_ONLY
    accumulates: bool
    """whether the batch adds to the existing gradients, as all but the first accumulated batch do"""
    keeps_old: bool = True
    """whether existing gradients that the batch does not add to are put back; otherwise they are freed"""
    shows_old: InitVar[bool] = False
    """whether the step may look at the existing gradients, and add to them, as in one process. Then `end_step` is
    called before the batch's backward."""
    shows_in_steps: bool = False
    """whether the step of each micro-batch may look at the existing gradients, inside `in_step`. They take memory until
    the last one has run."""
    separate: bool = False
    """whether the batch keeps its gradients separate from those that it adds to, if it does"""
    scales: bool = True
    """whether Lightning's backward may send another factor than expected; otherwise a device isn't asked, as a product
    with all gradients would read and write them once more"""
    finish: Callable[[], None] | None = None
    """called when all gradients are in `.grad`"""
    unguarded: Callable[[], AbstractContextManager[None]] = nullcontext
    """entered while gradients are put into `.grad`, also where user code has called backward"""
    _old: list[Tensor | None] = field(default_factory=list, init=False)
    _new: list[Tensor | None] = field(default_factory=list, init=False)

    def __post_init__(self, shows_old: bool) -> None:
        if not shows_old:
            self.end_step()

    def end_step(self) -> None:
        """Put aside the gradients that Lightning zeroes after the step: old ones, and those made in the step."""
        keeps_old = self.accumulates or self.keeps_old or self.shows_in_steps
        self._old = [parameter.grad if keeps_old else None for parameter in self.parameters]
        if not self.accumulates or self.separate:
            self._set([None] * len(self.parameters))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around user code of a step, where others are under way: it finds no gradients of theirs, and leaves none."""
        made = [parameter.grad for parameter in self.parameters]
        self._set(self._old if self.shows_in_steps else [None] * len(made))
        yield
        self._set(made)

    def stash(self) -> None:
        """Take the batch's gradients out of `.grad`, and put the old ones back."""
        self._new = [parameter.grad for parameter in self.parameters]
        self._set(self._old)

    def surrogate_loss(self, value: Tensor, scale: float | Tensor) -> Tensor:
        """Return a loss of this value for Lightning, whose backward puts the gradients into `.grad`.

        Lightning's backward is expected to send the gradient `scale`, which the stashed gradients contain.
        """
        return _SurrogateLoss.apply(self, scale, value.detach(), _ANCHOR)  # type: ignore[no-any-return]

    def apply(self, factor: Tensor) -> None:
        """Put the gradients into `.grad`, times `factor`. Does not wait for a device to read the factor.

        Raises:
            UnsupportedError: the factor is not 1, and the gradients have already been added to older ones.
        """
        if self.accumulates and not self.separate:
            _check(factor)
        else:
            new = [gradient for gradient in self._new if gradient is not None]
            if new and (self.scales if factor.device.type != "cpu" else factor != 1.0):
                torch._foreach_mul_(new, factor)
        with self.unguarded():
            if self.separate:
                pairs = zip(self._old, self._new, strict=True)
                self._new = [new if old is None else old if new is None else old.add_(new) for old, new in pairs]
            self._set(self._new)
            self._new = self._old = []
            if self.finish is not None:
                self.finish()

    def _set(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient


def _check(factor: Tensor) -> None:
    """Check that the factor is 1. On a device this does not wait; if the check fails there, it ends the process.

    It isn't finite where a loss in fp16 can't hold the loss scale. The gradients have then overflowed with it, and the
    scaler skips the step.
    """
    is_expected = (factor == 1.0) | ~factor.isfinite()
    message = (
        "While batches accumulate, the loss that Lightning runs backward on was multiplied by something else than "
        "1 / accumulate_grad_batches. Scale it in training_step, or in LightningModule.backward or on_before_backward."
    )
    if factor.device.type != "cpu":
        torch._assert_async(is_expected, message)
    elif not is_expected:
        raise UnsupportedError(message)


class _SurrogateLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, deferred: DeferredGradients, scale: float | Tensor, value: Tensor, anchor: Tensor) -> Tensor:
        ctx.deferred, ctx.scale = deferred, scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        scale = ctx.scale
        expected = scale.to(gradient.dtype) if isinstance(scale, Tensor) else torch.full_like(gradient, scale)
        ctx.deferred.apply(gradient / expected)  # exactly 1 if it is as expected
        return None, None, None, None


_ANCHOR = torch.ones((), requires_grad=True)
"""makes a surrogate loss require a gradient; it gets none itself"""
