"""The reduction: a stage's gradients summed over the data ranks, started as soon as that stage is done.

    large gradients    each summed where it lies, a transfer of its own
    small ones         | is there a gradient of p0? | of p1? | ... | p3's | p5's | ...      together, one per dtype

Nothing is copied or waited for before the step's end: the backend's own threads (or streams) do the work beside the
compute. A parameter that one data rank used and another didn't gets the sum; one that nobody used keeps no gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

GroupOf = Callable[[nn.Parameter], dist.ProcessGroup | None]

LARGE = 2**18
"""bytes from which a gradient goes alone: gloo copies what goes together into one buffer and back, and needs about as
long for a quarter of a megabyte as for starting another transfer"""


@dataclass(frozen=True)
class _Bucket:
    """Gradients of one dtype: what is summed for each parameter, and how many ranks have one, [parameters]."""

    parameters: Sequence[nn.Parameter]
    sums: Sequence[Tensor]
    counts: Tensor
    works: Sequence[dist.Work]


class GradientAllReduce:
    """Sums gradients over ranks.

    Args:
        parameters: each stage's own parameters; the first stage's include those outside the stack.
        group: the ranks that hold the same stages for other data; None if there is one. Or a function that says for
            each parameter whose gradients make the whole one.
    """

    def __init__(
        self, parameters: Mapping[int, Sequence[nn.Parameter]], group: dist.ProcessGroup | GroupOf | None
    ) -> None:
        self._sums: dict[int, dict[dist.ProcessGroup, list[nn.Parameter]]] = {}
        for stage, own in parameters.items():
            groups = self._sums[stage] = {}
            for parameter in own:
                among = group(parameter) if callable(group) else group
                if among is not None:
                    groups.setdefault(among, []).append(parameter)
        self._under_way: list[_Bucket] = []

    @property
    def has_no_peers(self) -> bool:
        """Whether there is nobody to sum with."""
        return not any(self._sums.values())

    def start(self, stage: int) -> None:
        """Start to sum the gradients of `stage`; until `finish` they are nobody else's.

        Called by all data ranks, for their stages in the same order.
        """
        for group, trained in self._sums[stage].items():
            ordered = sorted((p for p in trained if p.requires_grad), key=lambda p: str(p.dtype))
            for _, parameters in groupby(ordered, key=lambda p: p.dtype):
                self._under_way.append(_start(list(parameters), group))

    def finish(self) -> None:
        """Wait for all sums, which then are in `.grad`."""
        for bucket in self._under_way:
            for work in bucket.works:
                work.wait()
            _hand_out(bucket)
        self._under_way.clear()

    def forget(self) -> None:
        """Drop all that is under way, after a failure."""
        self._under_way.clear()
        self._sums.clear()


def _start(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> _Bucket:
    counts = parameters[0].new_ones(len(parameters))
    for i, parameter in enumerate(parameters):
        if parameter.grad is None:
            counts[i].zero_()  # on the device: a list of numbers would be copied there, and waited for
    taken: set[int] = set()
    sums = [_summand(parameter, taken) for parameter in parameters]
    together = [total for total in sums if not _goes_alone(total)]
    works = [group.allreduce([total]) for total in sums if _goes_alone(total)]
    return _Bucket(parameters, sums, counts, [*works, group.allreduce_coalesced([counts, *together])])


def _summand(parameter: nn.Parameter, taken: set[int]) -> Tensor:
    """The parameter's gradient, or zeros; in memory laid out as the parameter is, so the same on all ranks.

    And in no other's (`taken`): autograd gives `p` and `q` of `x + p.view(...) + q.view(...)` one gradient.
    """
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    memory = gradient.untyped_storage().data_ptr()
    if gradient.stride() != parameter.stride() or memory in taken:
        gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient)
    taken.add(memory)
    return gradient


def _goes_alone(total: Tensor) -> bool:
    """NCCL sums any number of tensors where they lie, in one launch."""
    return total.nbytes >= LARGE and not total.is_cuda


def _hand_out(bucket: _Bucket) -> None:
    """Give the sums to the parameters without a gradient here, but not to those without one anywhere."""
    missing = [i for i, parameter in enumerate(bucket.parameters) if parameter.grad is None]
    counts = bucket.counts.tolist() if missing else ()  # on CUDA this waits: only for parameters that weren't used
    for i in missing:
        if counts[i]:
            bucket.parameters[i].grad = bucket.sums[i]
