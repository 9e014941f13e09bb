"""What all ranks that train one copy of the model decide alike: steps, removed gradients, equal copies, saves.

`StepVotes`: a module's own `optimizer_step` may skip the step on one rank. In one process its condition would see all
gradients, so a step that one rank skips is skipped by all.

rank 0    closure    gradients are finite: optimizer.step()    vote "step" --+-- skipped    vote "end"
rank 1    closure    a gradient is NaN                         vote "end"  --+              vote "end"

`agree_after_hooks`: a gradient that a hook removes on one rank of a cube is removed on all of them, as they hold shards
of it. A hook that removes all gradients on some ranks of a pipeline is an error.

`ReplicaCheck`: every so many optimizer steps, ranks that must hold equal parameters compare their hashes.

              data 0    data 1               in a cube also the ranks that hold the same part
stage 0       3f a2     3f a2    equal
stage 1       77 b1     77 c9    differ: all ranks fail with an error that names the parameter and the ranks

`SavesOnException`: callbacks save a checkpoint of a failed run only if all ranks have stopped at the same step.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_hanayo.errors import HanayoError, PeerFailed, ReplicasDifferError, UnsupportedError
from lightning_hanayo.pipeline_parallel.object_collectives import all_gather_objects
from lightning_hanayo.strategy import failure
from lightning_hanayo.strategy.joining import on_all_ranks
from lightning_hanayo.strategy.lightning.state import unwrapped
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of, user_defines
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.versions import hashes_of

if TYPE_CHECKING:
    from lightning_hanayo.strategy.checkpoints.save import Checkpoints

Closure = Callable[[], Any]
_END, _STEP = 0, 1


class SkippedStep(Exception):
    """Leaves the optimizer's step after the closure. `NonFiniteCheck.step`, around all others, catches it."""


class StepVotes:
    """The votes of one rank in a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num_closures: int | None = None
        """how often the user's `optimizer_step` has run the closure; None: it doesn't run"""

    def run_override(
        self, hook: Callable[..., None], epoch: int, batch_idx: int, optimizer: Any, closure: Closure
    ) -> None:
        """Run the user's `optimizer_step`. Called by all ranks.

        Raises:
            UnsupportedError: it hasn't run the closure, or the optimizer has stepped on some ranks only.
        """
        num_steps = 0

        def run_closure() -> Any:
            self._num_closures = (self._num_closures or 0) + 1
            with self._run.guard.off():
                return closure()

        def note_step(*_: Any) -> None:  # however the optimizer was called
            nonlocal num_steps
            num_steps += 1

        self._num_closures = 0
        register = getattr(unwrapped(optimizer), "register_step_post_hook", None)  # Lightning takes other classes, too
        counter = None if register is None else register(note_step)
        try:
            hook(epoch, batch_idx, optimizer, run_closure)
        finally:
            num_closures, self._num_closures = self._num_closures, None
            if counter is not None:
                counter.remove()
        if not num_closures:
            raise UnsupportedError(
                f"optimizer_step didn't run optimizer_closure on rank {self._run.rank}, for which all ranks wait. Run "
                "it on every rank, and then decide whether to call optimizer.step()."
            )
        votes = self._exchange(_END, num_steps)
        while any(vote == _STEP for vote, _ in votes):  # another rank wants to step: this vote says no
            votes = self._exchange(_END, num_steps)
        counts = [count for _, count in votes]
        if len(set(counts)) > 1:
            raise UnsupportedError(
                f"optimizer_step has stepped the optimizer {counts} times on ranks 0 to {len(counts) - 1}. Call "
                "`optimizer.step()` of the optimizer that the hook gets, so that the ranks can agree."
            )

    def step(self, step: Callable[[Closure], Any], closure: Closure) -> Any:
        """Step the optimizer: `step` runs the closure, and then updates the parameters.

        Raises:
            SkippedStep: a rank skips it.
        """
        if self._num_closures is None:
            return step(closure)
        if self._num_closures:  # the hook has run the closure itself, so that only the update is to be skipped
            self._vote()
            return step(closure)

        def run_and_vote() -> Any:
            result = closure()
            self._vote()
            return result

        return step(run_and_vote)

    def _vote(self) -> None:
        if any(vote != _STEP for vote, _ in self._exchange(_STEP, 0)):
            raise SkippedStep

    def _exchange(self, vote: int, num_steps: int) -> list[tuple[int, int]]:
        """All ranks' votes, and how often each has stepped."""
        self._run.replica_relay.broadcast("vote")  # tells a rank that doesn't vote from one that is late
        return on_all_ranks(lambda: (vote, num_steps))


_HOOKS = ("on_after_backward", "on_before_optimizer_step")
"""where users look at gradients and remove them; the module's own hook runs after those of the callbacks"""


def agree_after_hooks(run: Run) -> None:
    """Let the ranks agree after each hook that is defined, for the time of the run."""
    for name in _HOOKS:
        if user_defines(run.trainer, name):
            run.attributes.wrap(run.module, name, partial(_agree, run, name))


def _agree(run: Run, name: str, hook: Callable[..., Any], *args: Any) -> None:
    """Takes the place of the module's hook.

    Raises:
        UnsupportedError: the hook has removed all gradients on some ranks only.
    """
    parameters = run.pipeline.parameters  # no groups in local variables: a traceback would keep them alive
    had_gradients = _any_gradient(parameters)
    hook(*args)
    run.replica_relay.broadcast("vote")
    if run.groups.cube is not None:  # a gradient that one rank lacks is removed on all: they hold shards of it
        present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        dist.all_reduce(present, dist.ReduceOp.MIN, group=run.groups.cube.whole)
        for parameter, is_present in zip(parameters, present.tolist(), strict=True):
            if not is_present:
                parameter.grad = None
    removed = had_gradients and not _any_gradient(parameters)
    counts = torch.tensor([int(had_gradients), int(removed)])
    dist.all_reduce(counts, group=run.groups.replica)
    num_had, num_removed = counts.tolist()
    if 0 < num_removed < num_had:
        raise UnsupportedError(
            f"{name} has {'removed' if removed else 'kept'} all gradients on rank {dist.get_rank()}, but not on all. "
            "Decide by get_total_norm of all gradients; to leave out these parameters alone, set requires_grad = False."
        )


def _any_gradient(parameters: Iterable[Tensor]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


Key = tuple[str, str]
"""a parameter's name, and which part of it"""


@dataclass(eq=False)
class ReplicaCheck:
    """One rank's part in comparing copies of parameters. Its methods are called by all ranks."""

    run: Run
    """of the Trainer"""
    stage_of: Callable[[str], int]
    """the stage of a parameter, by its name"""
    _last: int = field(default=0, init=False)

    def after(self, step: int) -> None:
        """Compare, if it is time after `step` optimizer steps.

        Raises:
            ReplicasDifferError: a parameter isn't the same on all ranks that hold it.
        """
        run, every = self.run, self.run.options.check_replicas
        if every is None or step % every or step == self._last:
            return
        self._last = step
        own = {name: one for name, one in run.module.named_parameters() if not one.is_meta}
        keys = [(name, str(run.region_of(one))) for name, one in own.items()]
        hashes = dict(zip(keys, hashes_of(own.values()), strict=True))
        data, cube = run.groups.data_control, run.groups.cube
        for group in (data, None if cube is None else cube.whole):
            found = [] if group is None else all_gather_objects(group, (run.rank, hashes))
            if (differing := first_difference(found)) is not None:
                raise ReplicasDifferError(self._message(step, *differing))

    def _message(self, step: int, name: str, ranks_by_hash: Mapping[int, Sequence[int]]) -> str:
        place = self.run.topology.place
        held = "; ".join(
            f"{value % 2**64:016x} on {' and '.join(f'rank {rank} ({place(rank)})' for rank in ranks)}"
            for value, ranks in ranks_by_hash.items()
        )
        return (
            f"after optimizer step {step} the copies of {name} (stage {self.stage_of(name)}) differ. Their hashes are "
            f"{held}. Ranks that hold the same parameter must update it alike: look for code that changes weights or "
            f"gradients on some ranks only, or with random numbers of its own, and for a faulty device. Go on from a "
            f"checkpoint that is older than the difference."
        )


def first_difference(found: Sequence[tuple[int, Mapping[Key, int]]]) -> tuple[str, dict[int, list[int]]] | None:
    """The first parameter whose hashes differ among ranks, and the ranks of each hash; None if there is none."""
    ranks: dict[Key, dict[int, list[int]]] = defaultdict(dict)
    for rank, hashes in found:
        for key, value in hashes.items():
            ranks[key].setdefault(value, []).append(rank)
    return next(((name, held) for (name, _), held in ranks.items() if len(held) > 1), None)


def _show_error(hook: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Run a callback's `on_exception`. An error in it is shown in one line."""
    try:
        hook(*args, **kwargs)
    except Exception as error:
        owner = type(getattr(hook, "__self__", None)).__name__
        name = getattr(hook, "__name__", "on_exception")  # a partial has none
        line = str(error).partition("\n")[0]
        print(f"{owner}.{name} failed, too: {type(error).__name__}: {line}", file=sys.stderr)


@dataclass(eq=False)
class SavesOnException:
    """One rank's part in the agreement on saves after an error, for one run.

    The ranks' monitors agree: a rank that waits for another one's message can't take part in a collective.
    """

    run: Run
    """of the Trainer whose callbacks save"""
    checkpoints: "Checkpoints"
    """of the run"""
    _why_not: str | None = field(default=None, init=False)
    """why nothing is saved; "": the ranks have agreed to save; None: they haven't met"""

    def __post_init__(self) -> None:
        """Let the callbacks that save ask all ranks before, and show errors in all of them."""
        trainer, attributes = self.run.trainer, self.run.attributes
        for owner in (*callbacks_of(trainer), getattr(trainer, "datamodule", None)):
            if isinstance(owner, Checkpoint) and self.run.topology.world_size > 1:
                attributes.wrap(owner, "on_exception", self._save)
            elif owner is not None and not isinstance(owner, Checkpoint):
                attributes.wrap(owner, "on_exception", _show_error)

    def _save(
        self, hook: Callable[..., object], trainer: "pl.Trainer", module: "pl.LightningModule", exception: BaseException
    ) -> None:
        """Run a callback's `on_exception`. An error in it is shown; the exception stays the run's error."""
        callback = getattr(hook, "__self__", None)
        if isinstance(callback, ModelCheckpoint) and not callback.save_on_exception:
            hook(trainer, module, exception)
            return
        if isinstance(exception, PeerFailed):  # which says that a rank has failed alone
            return
        try:
            self._agree()
            hook(trainer, module, exception)
            self.checkpoints.finish()
        except Exception as error:
            print(f"No checkpoint is saved on this {type(exception).__name__}: {error}", file=sys.stderr)

    def check(self) -> None:
        """Called before anything is saved. After an exception, it is a callback's own `on_exception` that saves.

        Raises:
            HanayoError: not all ranks have stopped at the same step.
        """
        status = self.run.trainer.state.status
        is_after_error = sys.exception() is not None and status == TrainerStatus.INTERRUPTED
        if is_after_error and self.run.topology.world_size > 1:
            self._agree()

    def _agree(self) -> None:
        """Agree with all ranks that come here in time. The decision of the first of them counts for all."""
        if self._why_not is None:
            failures = self.run.failures
            topic, place = f"on_exception/{failures.run}", [self.run.trainer.global_step, *failures.position[:3]]
            failures.monitor.answer(topic, lambda _: place)
            self._why_not = str(failures.monitor.settle(topic, self._judge, within=failure.GRACE / 2))
        if self._why_not:
            raise HanayoError(self._why_not)

    def _judge(self, places: dict[int, list[int]]) -> str:
        """Why all ranks can't have stopped at the same place; "" if they have."""
        name = self.run.failures.name
        missing = [rank for rank in range(self.run.topology.world_size) if rank not in places]
        if missing:
            why = f"{name(missing[0])} has not stopped with an error, so ranks may be at different steps"
        else:
            first, own = min(places.items())
            rank, other = next((one for one in sorted(places.items()) if one[1] != own), (first, own))
            if own == other:
                return ""
            why = f"{name(first)} has stopped after step {own[0]} in its batch {own[1]}, "
            why += f"{name(rank)} after step {other[0]} in its batch {other[1]}"
        newest = self.checkpoints.newest
        way_out = "No checkpoint was saved" if newest is None else f"Resume from {newest}, which was saved"
        return f"{why}. {way_out} before."
