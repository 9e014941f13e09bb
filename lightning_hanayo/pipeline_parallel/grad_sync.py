"""Sums a stage's gradients over the data ranks, beginning as soon as the stage has finished its backward.

    scattered ones     if the optimizer is sharded: each data rank gets the sums that it needs, by a reduce-scatter
    large gradients    each is reduced in place, by an all-reduce of its own
    small ones         | is there a gradient of p0? | of p1? | ... | p3's | p5's | ...      one all-reduce per dtype
    sparse ones        rows are exchanged: two all-reduces each

The all-reduces overlap with the computation, and nothing is waited for before the step's end. A parameter that one data
rank used and another did not gets the sum on both. A parameter that no rank used gets no gradient.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from math import inf
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.monitor.hangs.waiting import Waiting
from lightning_hanayo.weight_gradients import gradient_dtype

GroupOf = Callable[[nn.Parameter], dist.ProcessGroup | None]


class Transfer(Protocol):
    """Sums under way."""

    def wait(self) -> object:
        """Block until they are in the gradients."""


class Scatter(Protocol):
    """Sums of which each data rank needs only its own part."""

    def sums(self, parameter: nn.Parameter, group: dist.ProcessGroup) -> bool:
        """Whether it sums the gradient of this parameter over this group."""

    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Transfer:
        """Start to sum gradients, in place. Called by all data ranks."""


LARGE = 2**18
"""bytes from which a gradient gets its own all-reduce: gloo copies what is reduced together into one buffer and back,
which takes about as long for a quarter of a megabyte as starting another all-reduce"""


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
    works: Sequence[Transfer]
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
            self._under_way += [_start_sparse(parameter, group) for parameter in needed if parameter in self._sparse]
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
        """After a failure: drop the groups. What is under way stays until they are left.

        gloo sends messages of several operations through one connection. If a buffer went while its message arrives, an
        all-reduce behind it would never end, and with it the process group.
        """
        self._groups.clear()

    def drop_transfers(self) -> None:
        """After a failure, when the groups have been left: free what was under way."""
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
    works: list[Transfer] = [group.allreduce([total]) for total in alike if total.nbytes >= large]
    if scatter is not None and any(is_scattered):
        works.append(scatter.reduce_scatter(list(compress(sums, is_scattered))))
    works.append(group.allreduce_coalesced([counts, *together]))
    return _Bucket(parameters, sums, counts, works, tuple(dist.get_process_group_ranks(group)))


def _start_sparse(parameter: nn.Parameter, group: dist.ProcessGroup) -> _Bucket:
    dtype, gradient = gradient_dtype(parameter), parameter.grad
    if gradient is None:
        total = torch.zeros_like(parameter, dtype=dtype).to_sparse(1)
    else:  # where the weight is used in another way, too, autograd gives all rows
        total = parameter.grad = gradient if gradient.is_sparse else gradient.to_sparse(1)
    counts = parameter.new_full((1,), float(gradient is not None), dtype=dtype)
    works = [group.allreduce([counts]), group.allreduce([total])]
    return _Bucket([parameter], [total], counts, works, tuple(dist.get_process_group_ranks(group)))


def _summand(parameter: nn.Parameter, taken: set[int]) -> Tensor:
    """The parameter's gradient, or zeros, with the parameter's strides, which are the same on all ranks.

    Its memory is not in `taken`: autograd gives `p` and `q` of `x + p.view(...) + q.view(...)` the same memory.
    """
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    if gradient.is_sparse:
        raise UnsupportedError(
            f"a parameter of shape {list(parameter.shape)} has a sparse gradient. Only weights of nn.Embedding and "
            f"nn.EmbeddingBag with sparse=True may have one with several data ranks, which must know it beforehand."
        )
    memory = gradient.untyped_storage().data_ptr()
    if gradient.stride() != parameter.stride() or memory in taken:
        gradient = parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    taken.add(memory)
    return gradient
