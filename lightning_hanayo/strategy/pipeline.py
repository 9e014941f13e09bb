"""The pipeline: one data replica's ranks, and what one of them does with a batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from lightning_hanayo.partition.ownership import Ownership
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.runtime import microbatches
from lightning_hanayo.runtime.autograd.gradient_all_reduce import GradientAllReduce
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.user_step import UserStep
from lightning_hanayo.runtime.comm.relay import Relay
from lightning_hanayo.runtime.engine import Engine
from lightning_hanayo.runtime.program import Program
from lightning_hanayo.runtime.random_streams import RandomStreams
from lightning_hanayo.schedule import forward_only, reduction_order
from lightning_hanayo.strategy.loss_weight import Shares
from lightning_hanayo.strategy.sharing import Sharing, Split
from lightning_hanayo.tensor3d.boundary.outside_parameters import OutsideParameters

StepOf = Callable[[Any], Any]
"""The user's step on one micro-batch."""
SharesOf = Callable[[Sequence[Any]], Shares]


class Log(Protocol):
    """What collects the log calls of a batch's micro-batches."""

    def collecting(self) -> AbstractContextManager[None]:
        """Open while they run."""

    def enter(self, microbatch: int | None) -> None:
        """That micro-batch's user code runs next; None: code that counts for nothing."""


LogOf = Callable[[Split, Sequence[float], Sharing], Log]
"""Makes the log of a batch from its pieces and what each of them counts."""


@dataclass
class Pipeline:
    """One rank's part of it. On pipeline rank 0 `user` plays the user's step."""

    layout: Layout
    ownership: Ownership
    rank: int
    engine: Engine
    chain: Relay
    reduction: GradientAllReduce
    user: UserStep
    parameters: list[nn.Parameter]
    """those this rank holds"""
    sharing: Sharing
    dense: OutsideParameters | None = None
    """those that are cut over a cube between batches"""
    dense_reduction: GradientAllReduce | None = None
    streams: RandomStreams | None = None
    """where the random numbers of steps and blocks come from; None: from torch's own generators as they are"""
    _programs: dict[tuple[int, bool], Program] = field(default_factory=dict)

    def train(
        self, batch: Any, key: str, step: StepOf, shares_of: SharesOf, log_of: LogOf, *, scale: float, reduce: bool
    ) -> Any:
        """Run forward and backward of a batch. Called by all ranks; only rank 0's arguments count.

        Args:
            batch: what is cut into micro-batches.
            key: names the batch; its random numbers depend on it.
            step: the user's `training_step`.
            shares_of: each micro-batch's share in the loss.
            log_of: merges what the step logs.
            scale: the gradient of the loss.
            reduce: whether to sum gradients over data ranks.

        Returns:
            On pipeline rank 0 the step's results, merged; None elsewhere. The gradients are in `.grad`.
        """
        return self._play(batch, key, step, shares_of, log_of, scale=scale, reduce=reduce, train=True)

    def evaluate(self, batch: Any, key: str, step: StepOf, shares_of: SharesOf, log_of: LogOf) -> Any:
        """Run the forward of a batch; as `train`."""
        return self._play(batch, key, step, shares_of, log_of, scale=1.0, reduce=False, train=False)

    def reduce(self) -> None:
        """Sum the gradients that are there over data ranks, where `train` didn't. Called by all ranks."""
        if not self.reduction.is_alone:
            own = self.ownership.stages_of(self.rank)
            for stage in reduction_order(self.layout.table(self.layout.num_microbatches)):
                if stage in own:
                    self.reduction.start(stage)
            self.reduction.finish()
        self._reduce_dense()

    def close(self) -> None:
        """End the threads, once the others have got what this rank sent them."""
        self.engine.mail.finish()
        self.user.stop()

    def abandon(self) -> None:
        """Let go of everything under way and of the connections, after a failure."""
        self.engine.mail.forget()
        self.reduction.forget()
        if self.dense is not None:
            self.dense.forget()
        self.engine.mail.transport.close()
        self.user.stop()

    def _play(
        self,
        batch: Any,
        key: str,
        step: StepOf,
        shares_of: SharesOf,
        log_of: LogOf,
        *,
        scale: float,
        reduce: bool,
        train: bool,
    ) -> Any:
        sums = reduce and not self.reduction.is_alone
        if self.rank > 0:
            num_microbatches, signature, key = self.chain.share("batch")
            self._run(Batch(signature, sums), num_microbatches, key, train=train, reduce=reduce)
            return None
        parts = microbatches.sizes(microbatches.num_samples(batch), self.layout.num_microbatches)
        split = self.sharing.split(batch, parts)
        shares = shares_of(split.pieces)
        log = log_of(split, shares.of_mean, self.sharing)
        kind = f"train={train} reduce={reduce} grad={torch.is_grad_enabled()}"
        running = Batch(
            microbatches.signature(batch, parts, kind),
            sums,
            step=lambda m: step(split.played[m]),
            dry_run_step=lambda m: step(split.rows[m]),
            on_user_code=log.enter,
            loss_weights=[shares.of_gradient[piece] * scale for piece in split.own],
        )
        with log.collecting():
            self.chain.share("batch", [len(parts), running.signature, key])
            self._run(running, len(parts), key, train=train, reduce=reduce)
        results = [running.results.pop(m) for m in range(len(parts))]
        return self.sharing.merge(results, split, shares.of_loss, has_loss=train)

    def _run(self, batch: Batch, num_microbatches: int, key: str, *, train: bool, reduce: bool) -> None:
        if self.dense is not None:
            self.dense.gather()
        with self.streams.batch(key) if self.streams is not None else nullcontext():
            self.engine.run(self._program(num_microbatches, train), batch)
        self.reduction.finish()
        if self.dense is not None:
            self.dense.scatter()
        if reduce:
            self._reduce_dense()

    def _reduce_dense(self) -> None:
        """Sum the parts of parameters outside the 3-D layers over data ranks."""
        if self.dense_reduction is not None:
            self.dense_reduction.start(0)
            self.dense_reduction.finish()

    def _program(self, num_microbatches: int, train: bool) -> Program:
        key = (num_microbatches, train)
        if key not in self._programs:
            table = self.layout.table(num_microbatches)
            self._programs[key] = Program.of(table if train else forward_only(table), self.rank)
        return self._programs[key]
