"""Lends weights that blocks on several pipeline ranks share: they belong to rank 0, and others get copies for a batch.

            between batches    batch begins            batch ends
    rank 0  w                  broadcasts w            w.grad = sum of all ranks' gradients
    rank 1  placeholder        copy in its place       placeholder again; the copy's gradient is dropped

So optimizers, norms and checkpoints find each weight once. A batch costs a broadcast, and an all-reduce of gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce


class SharedWeights:
    """The shared weights of a model, on one rank.

    Args:
        model: has them, or placeholders of them.
        weights: in the same order on all ranks; those of pipeline rank 0 have values.
        group: the ranks of the pipeline.
        device: of this rank's copies.
    """

    def __init__(
        self, model: nn.Module, weights: Sequence[nn.Parameter], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.weights = weights
        self._group = group
        self._copies = list(weights)
        self._places: list[tuple[dict[str, nn.Parameter | None], str, int]] = []
        if group.rank() > 0:
            self._copies = [
                nn.Parameter(torch.empty_like(one, device=device), requires_grad=one.requires_grad) for one in weights
            ]
            index_of = {one: i for i, one in enumerate(weights)}
            for module in model.modules():
                found = [(key, one) for key, one in module._parameters.items() if one is not None and one in index_of]
                self._places += [(module._parameters, key, index_of[one]) for key, one in found]

    def begin(self) -> None:
        """Put copies in the places of placeholders. Called by all ranks of the pipeline."""
        for copy in self._copies:
            dist.broadcast(copy.detach(), group=self._group, group_src=0)
        for parameters, key, index in self._places:
            parameters[key] = self._copies[index]

    def end(self) -> None:
        """Take the copies out again, and sum their gradients on rank 0. Called by all ranks of the pipeline."""
        self.take_out()
        total = GradientAllReduce({0: self._copies}, self._group)
        total.start(0)
        total.finish()
        if self._group.rank() > 0:
            for copy in self._copies:
                copy.grad = None

    def take_out(self) -> None:
        """Put placeholders in the places of copies."""
        for parameters, key, index in self._places:
            parameters[key] = self.weights[index]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Copies are there inside it, for code that computes no gradients."""
        self.begin()
        try:
            yield
        finally:
            self.end()
