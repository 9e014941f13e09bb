"""The process-group transport: gloo on CPU, NCCL on GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_hanayo.runtime.transport import Post, Transport, Work

OnFailure = Callable[[Exception], NoReturn]
"""Called with what a transfer raised; says who failed first, and raises."""


@dataclass(frozen=True)
class _Guarded:
    work: dist.Work
    on_failure: OnFailure

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            self.on_failure(error)


class ProcessGroupTransport(Transport):
    """Messages among the ranks of one pipeline, over `torch.distributed`.

    On GPUs, NCCL plays the transfers between two ranks in the order in which they were posted. So each direction
    (towards higher, towards lower ranks) has a communicator of its own: a receive posted early can't stand in the way
    of a send to the same peer. (Grouping a batch into one NCCL call would put all peers' transfers into one such order,
    and receives posted ahead could wait for each other.) Buffers on the CPU go over the control group.

    Args:
        ranks: the global ranks of the pipeline, in pipeline order.
        control: a gloo group over `ranks`.
        down, up: groups over `ranks` for buffers on a GPU, to a higher and to a lower pipeline rank.
        device: where the payload lies.
        on_failure: see `OnFailure`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        control: dist.ProcessGroup,
        down: dist.ProcessGroup,
        up: dist.ProcessGroup,
        device: torch.device,
        on_failure: OnFailure,
    ) -> None:
        self.rank = tuple(ranks).index(dist.get_rank())
        self.num_ranks = len(ranks)
        self.device = device
        self._control, self._down, self._up = control, down, up
        self._on_failure = on_failure

    @override
    def close(self) -> None:
        del self._control, self._down, self._up

    @override
    def start(self, posts: Sequence[Post]) -> list[Work]:
        try:
            return [_Guarded(self._start(post), self._on_failure) for post in posts]
        except RuntimeError as error:
            self._on_failure(error)

    def _start(self, post: Post) -> dist.Work:
        group = self._group(post)
        if post.direction == "send":
            return group.send([post.buffer], post.peer, post.tag)
        return group.recv([post.buffer], post.peer, post.tag)

    def _group(self, post: Post) -> dist.ProcessGroup:
        if not post.buffer.is_cuda:
            return self._control
        return self._down if (post.peer > self.rank) == (post.direction == "send") else self._up
