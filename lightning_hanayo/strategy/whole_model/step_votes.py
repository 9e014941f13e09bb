"""Lets the ranks agree whether the optimizer steps, where the user's `optimizer_step` decides it on each rank alone.

rank 0    closure    gradients are finite: optimizer.step()    vote "step" --+-- skipped    vote "end"
rank 1    closure    a gradient is NaN                         vote "end"  --+              vote "end"

In one process the condition would see all gradients, so a step that one rank skips is skipped by all. Only modules that
override `optimizer_step` vote; other ones always step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.comm.relay import Relay
from lightning_hanayo.strategy.lightning.optimizers import unwrapped
from lightning_hanayo.strategy.lightning.user_hooks import overrides
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

Closure = Callable[[], Any]
Unguarded = Callable[[], AbstractContextManager[None]]
_END, _STEP = 0, 1


@dataclass
class _Override:
    """A call of the user's `optimizer_step`: how often the closure has run, and how often the optimizer has stepped."""

    unguarded: Unguarded
    num_closures: int = 0
    num_steps: int = 0

    def counts(self, closure: Closure) -> Closure:
        """The closure, which runs forward and backward of the batch."""

        def run() -> Any:
            self.num_closures += 1
            with self.unguarded():
                return closure()

        return run

    def on_step(self, *_: Any) -> None:
        """Called after each step of the optimizer, however it was called."""
        self.num_steps += 1


class _Skipped(Exception):
    """Leaves the optimizer's step after the closure."""

    def __init__(self, result: Any) -> None:
        super().__init__("another rank skips this step")
        self.result = result


class StepVotes:
    """The votes of one rank.

    Args:
        relay: tells a rank that doesn't vote from one that is late.
        rank: of this process, in errors.
        unguarded: entered while code runs that knows of parts and placeholders of parameters.
    """

    def __init__(self, relay: Relay, rank: int, unguarded: Unguarded = nullcontext) -> None:
        self._relay = relay
        self._rank = rank
        self._unguarded = unguarded
        self._override: _Override | None = None

    def run_override(self, hook: Callable[[Closure], None], closure: Closure, optimizer: Optimizer) -> None:
        """Run the user's `optimizer_step`. Called by all ranks.

        Raises:
            UnsupportedError: it hasn't run the closure, or the optimizer has stepped on some ranks only.
        """
        self._override = override = _Override(self._unguarded)
        register = getattr(unwrapped(optimizer), "register_step_post_hook", None)  # Lightning takes other classes, too
        counter = None if register is None else register(override.on_step)
        try:
            hook(override.counts(closure))
        finally:
            self._override = None
            if counter is not None:
                counter.remove()
        self._check_closure(override)
        self._end(override.num_steps)

    def step(self, step: Callable[[Closure], Any], closure: Closure) -> Any:
        """Step the optimizer, unless a rank skips: `step` runs the closure, and then updates the parameters."""
        override = self._override
        if override is None:
            return step(closure)
        if override.num_closures:
            return step(closure) if self._all_step() else None
        try:
            return step(partial(self._run_and_vote, closure))
        except _Skipped as skipped:
            return skipped.result

    def _run_and_vote(self, closure: Closure) -> Any:
        result = closure()
        if not self._all_step():
            raise _Skipped(result)
        return result

    def _all_step(self) -> bool:
        return all(vote == _STEP for vote, _ in self._exchange(_STEP, 0))

    def _check_closure(self, override: _Override) -> None:
        if not override.num_closures:
            raise UnsupportedError(
                f"optimizer_step didn't run optimizer_closure on rank {self._rank}. The closure runs forward and "
                f"backward of the pipeline, for which all ranks wait. Run it on every rank, and then decide whether to "
                f"call optimizer.step()."
            )

    def _end(self, num_steps: int) -> None:
        """Vote until no rank wants to step any more, and check that all have stepped equally often."""
        votes = self._exchange(_END, num_steps)
        while any(vote == _STEP for vote, _ in votes):
            votes = self._exchange(_END, num_steps)
        counts = [count for _, count in votes]
        if len(set(counts)) > 1:
            raise UnsupportedError(
                f"optimizer_step has stepped the optimizer {counts} times on ranks 0 to {len(counts) - 1}: the parts "
                f"of the model would diverge. Call `optimizer.step()` of the optimizer that the hook gets, not of "
                f"another one, so that the ranks can agree."
            )

    def _exchange(self, vote: int, num_steps: int) -> list[tuple[int, int]]:
        """All ranks' votes, and how often each has stepped."""
        self._relay.broadcast("vote")
        own = torch.tensor([vote, num_steps])
        votes = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(votes, own)
        return [(int(one[0]), int(one[1])) for one in votes]


def vote_on_steps(module: "pl.LightningModule", attributes: TemporaryAttributes) -> None:
    """Let the ranks agree, until `attributes` are restored, if the module overrides `optimizer_step`."""
    if overrides(module, "optimizer_step"):
        hook = partial(_optimizer_step, module, vars(module).get("optimizer_step"))
        attributes.set(module, "optimizer_step", hook)


def _optimizer_step(
    module: "pl.LightningModule",
    instance_hook: Callable[..., None] | None,
    epoch: int,
    batch_idx: int,
    optimizer: Any,
    closure: Closure,
) -> None:
    """Takes the place of the module's hook. It holds nothing of the run, so that the module can be copied."""
    hook = instance_hook or partial(type(module).optimizer_step, module)
    votes: StepVotes = module.trainer.strategy.session.votes  # type: ignore[attr-defined]
    votes.run_override(partial(hook, epoch, batch_idx, optimizer), closure, optimizer)
