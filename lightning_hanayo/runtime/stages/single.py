"""The single stage: a model that is one stage on one rank. The user's step runs there as in plain PyTorch.

    rank 0   0F0 0B0 0F1 0B1 ...      0F: the step, up to the loss      0B: the loss's backward

Nothing is suspended, recorded or sent. So whatever works in a plain step works here, at the same speed.
"""

from dataclasses import dataclass

from typing_extensions import override

from lightning_hanayo.runtime.autograd import graph_boundary
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.user_step import UserStep
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.stages.base import Stage
from lightning_hanayo.runtime.stages.first_last import detach_tree, loss_of


@dataclass(eq=False, repr=False, kw_only=True)
class SingleStage(Stage):
    """The whole of the user's step."""

    user: UserStep

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        batch.results[microbatch] = self.user.run(batch, microbatch)

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        loss, weight = loss_of(batch.results[microbatch]), batch.loss_weights[microbatch]
        if weight:  # with weight 0 not even a NaN counts: the mean over no tokens is one
            with graph_boundary.without_autocast():
                (loss * weight).backward()
        batch.results[microbatch] = detach_tree(batch.results[microbatch])
