"""What all ranks that train one copy of the model decide alike: steps, removed gradients, equal copies, saves.

Lets the ranks agree whether the optimizer steps, where the user's `optimizer_step` decides it on each rank alone.

rank 0    closure    gradients are finite: optimizer.step()    vote "step" --+-- skipped    vote "end"
rank 1    closure    a gradient is NaN                         vote "end"  --+              vote "end"

In one process the condition would see all gradients, so a step that one rank skips is skipped by all. Only modules that
override `optimizer_step` vote; other ones always step.

Gradients that a hook removes, by what it finds on one rank, are removed on all ranks, or it is an error.

rank 0 of a cube finds a NaN in its shard    p.grad = None    --+-- removed on both: they hold shards of one gradient
rank 1 of a cube finds none in its own       p.grad is kept   --+

pipeline rank 0 finds a NaN                  zero_grad()      --+-- an error: it may be meant for these parameters alone
pipeline rank 1 finds none                   grads are kept   --+

Compares hashes of parameters between the ranks that must hold equal ones, every so many optimizer steps.

              data 0    data 1               in a cube also the ranks that hold the same part
stage 0       3f a2     3f a2    equal
stage 1       77 b1     77 c9    differ: all ranks fail with an error that names the parameter and the ranks

A hash is a sum of the bits of all elements, as integers, each times an odd number that depends on its place. It is
computed where the parameter is, and only the sums come to the host.

Checkpoints that callbacks save because a run fails: only if all ranks have stopped at the same step.

rank 0   error in a hook, step 12   --+-- the same on both: the callback saves
rank 1   error in a hook, step 12   --+

rank 0   waits for a message of rank 1
rank 1   error in its step          alone: it saves nothing, says so, and fails with its error

What goes wrong in callbacks after the error is shown in one line. The error stays the run's own.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hanayo.errors import HanayoError, PeerFailed, ReplicasDifferError, UnsupportedError
from lightning_hanayo.packed_values import stored_tensors
from lightning_hanayo.pipeline_parallel.comm.object_collectives import all_gather_objects
from lightning_hanayo.pipeline_parallel.transport import Relay
from lightning_hanayo.strategy import failure
from lightning_hanayo.strategy.failure import Failures
from lightning_hanayo.strategy.lightning.state import unwrapped
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of, is_listened_to, overrides
from lightning_hanayo.strategy.patches import TemporaryAttributes

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


_HOOKS = ("on_after_backward", "on_before_optimizer_step")
"""where users look at gradients and remove them; the module's own hook runs after those of the callbacks"""


def agree_after_hooks(trainer: "pl.Trainer", module: "pl.LightningModule", attributes: TemporaryAttributes) -> None:
    """Let the ranks agree after each hook that is defined, until `attributes` are restored."""
    for name in _HOOKS:
        if is_listened_to(trainer, name):
            attributes.set(module, name, partial(_hook, module, name, vars(module).get(name)))


def agree_in_cube(parameters: Sequence[nn.Parameter], cube: dist.ProcessGroup) -> None:
    """Remove the gradients that a rank of the cube lacks. Called by all of its ranks, with the same parameters."""
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    dist.all_reduce(present, dist.ReduceOp.MIN, group=cube)
    for parameter, is_present in zip(parameters, present.tolist(), strict=True):
        if not is_present:
            parameter.grad = None


def check_alike(hook: str, *, had_gradients: bool, has_gradients: bool, replica: dist.ProcessGroup) -> None:
    """Check that a hook has removed all gradients on all ranks or on none. Called by all that train one copy.

    Raises:
        UnsupportedError: it has done so on some ranks only.
    """
    removed = had_gradients and not has_gradients
    counts = torch.tensor([int(had_gradients), int(removed)])
    dist.all_reduce(counts, group=replica)
    num_had, num_removed = counts.tolist()
    if 0 < num_removed < num_had:
        raise UnsupportedError(
            f"{hook} has {'removed' if removed else 'kept'} all gradients on rank {dist.get_rank()}, but not on all "
            f"ranks, which hold different parameters. Decide by a value of the whole model, such as get_total_norm of "
            f"all gradients, or in optimizer_step, where the ranks agree. If these parameters alone are meant, zero "
            f"their gradients, or set requires_grad = False."
        )


def _hook(module: "pl.LightningModule", name: str, instance_hook: Callable[..., Any] | None, *args: Any) -> None:
    """Takes the place of the module's hook. It holds nothing of the run, so that the module can be copied."""
    hook = instance_hook or partial(getattr(type(module), name), module)
    session: Any = module.trainer.strategy.session  # type: ignore[attr-defined]
    parameters = session.pipeline.parameters  # no groups in local variables: a traceback would keep them alive
    had_gradients = _any_gradient(parameters)
    hook(*args)
    session.replica_relay.broadcast("vote")
    if session.groups.cube is not None:
        agree_in_cube(parameters, session.groups.cube.whole)
    check_alike(
        name, had_gradients=had_gradients, has_gradients=_any_gradient(parameters), replica=session.groups.replica
    )


def _any_gradient(parameters: Iterable[Tensor]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15
_CHUNK, _CHUNK_ON_DEVICE = 2**16, 2**22
"""elements that are read as 64-bit integers at a time: on a CPU few enough for its cache"""
Key = tuple[str, str]
"""a parameter's name, and which part of it"""


class ReplicaCheck:
    """One rank's part in it. Its methods are called by all ranks.

    Args:
        every: how many optimizer steps there are from one comparison to the next; None: it is never done.
        parameters: those that this rank holds, by name and part.
        groups: gloo groups whose ranks must have equal values under equal names and parts.
        stage_of: the stage of a parameter, by its name.
        place_of: where a rank is, for messages.
    """

    def __init__(
        self,
        every: int | None,
        parameters: Mapping[Key, nn.Parameter],
        groups: Sequence[dist.ProcessGroup],
        stage_of: Callable[[str], int],
        place_of: Callable[[int], str],
    ) -> None:
        self._every = every
        self._parameters = dict(parameters)
        self._groups = list(groups)
        self._stage_of = stage_of
        self._place_of = place_of
        self._last = 0

    def after(self, step: int) -> None:
        """Compare, if it is time after `step` optimizer steps.

        Raises:
            ReplicasDifferError: a parameter isn't the same on all ranks that hold it.
        """
        if self._every is None or step % self._every or step == self._last or not self._groups:
            return
        self._last = step
        hashes = hashes_of(self._parameters)
        for group in self._groups:
            found = all_gather_objects(group, (dist.get_rank(), hashes))
            differing = first_difference(found)
            if differing is not None:
                raise ReplicasDifferError(self._message(step, *differing))

    def close(self) -> None:
        """Forget the other ranks: the run has ended."""
        self._groups.clear()

    def _message(self, step: int, name: str, ranks_by_hash: Mapping[int, Sequence[int]]) -> str:
        held = "; ".join(
            f"{value % 2**64:016x} on {' and '.join(f'rank {rank} ({self._place_of(rank)})' for rank in ranks)}"
            for value, ranks in ranks_by_hash.items()
        )
        return (
            f"after optimizer step {step} the copies of {name} (stage {self._stage_of(name)}) differ. Their hashes are "
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


def hashes_of(parameters: Mapping[Key, nn.Parameter]) -> dict[Key, int]:
    """The hash of each parameter. The host waits for the device once."""
    if not parameters:
        return {}
    values = torch.stack([_hash(parameter) for parameter in parameters.values()]).tolist()
    return dict(zip(parameters, values, strict=True))


def _hash(parameter: nn.Parameter) -> Tensor:
    """[], in int64, on the parameter's device."""
    total = torch.zeros((), dtype=torch.int64, device=parameter.device)
    for tensor in (one for one in stored_tensors(parameter) if one.numel()):
        for bits in _bits(tensor.detach()).split(_CHUNK if total.device.type == "cpu" else _CHUNK_ON_DEVICE):
            numbers = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
            total = total * _ODD + (bits.long() * numbers.mul_(_ODD)).sum()
    return total


def _bits(tensor: Tensor) -> Tensor:
    real: Any = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).view(_BITS[real.element_size()])  # type: ignore[no-any-return]


_AGREED = "agreed"
_ASK, _POLL = 0.5, 0.01
"""seconds to wait for answers, and between two questions"""


class SavesOnException:
    """One rank's side of it, for one run.

    The ranks' monitors agree: a rank that waits for another one's message can't take part in a collective.

    Args:
        trainer: whose callbacks save.
        failures: this rank's; have the monitor.
        num_ranks: of the world.
        finish: called once a callback has saved; waits until the checkpoint is there.
        newest: returns the path of the last checkpoint that this run has saved, None without one.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        failures: Failures,
        num_ranks: int,
        *,
        finish: Callable[[], object],
        newest: Callable[[], str | None],
    ) -> None:
        self._trainer = trainer
        self._failures = failures
        self._num_ranks = num_ranks
        self._finish, self._newest = finish, newest
        self._decision: str | None = None

    def adapt_callbacks(self, attributes: TemporaryAttributes) -> None:
        """Let the callbacks that save ask all ranks before, and show what goes wrong in all of them."""
        for owner in (*callbacks_of(self._trainer), getattr(self._trainer, "datamodule", None)):
            if isinstance(owner, Checkpoint) and self._num_ranks > 1:
                attributes.set(owner, "on_exception", _AgreedHook(owner.on_exception, self))
            elif owner is not None and not isinstance(owner, Checkpoint):
                attributes.set(owner, "on_exception", _Shown(owner.on_exception))

    def save(self, hook: Callable[..., object], exception: BaseException, *args: Any) -> None:
        """Run a callback's `on_exception`. What goes wrong in it is shown; the exception stays the run's error."""
        if isinstance(exception, PeerFailed):  # which says that a rank has failed alone
            return
        try:
            self._agree()
            hook(*args, exception)
            self._finish()
        except Exception as error:
            print(f"No checkpoint is saved on this {type(exception).__name__}: {error}", file=sys.stderr)

    def check(self) -> None:
        """Called before anything is saved. After an exception, it is a callback's own `on_exception` that saves.

        Raises:
            HanayoError: not all ranks have stopped at the same step.
        """
        is_after_error = sys.exception() is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED
        if is_after_error and self._num_ranks > 1:
            self._agree()

    def _agree(self) -> None:
        if self._decision is None:
            self._decision = self._decide()
        if self._decision != _AGREED:
            raise HanayoError(self._decision)

    def _decide(self) -> str:
        """Agree with all ranks that come here in time. What the first of them decides counts for all."""
        monitor, topic = self._failures.monitor, f"on_exception/{self._failures.run}"
        place = [self._trainer.global_step, *self._failures.position[:3]]
        monitor.answer(f"{topic}/place", lambda _: place)
        deadline = time.monotonic() + failure.GRACE / 2
        while (decision := monitor.verdict(topic)) is None:
            places = monitor.ask(f"{topic}/place", timeout=_ASK)
            if len(places) == self._num_ranks or time.monotonic() > deadline:
                decision = monitor.decide(topic, self._judge(places))
                break
            time.sleep(_POLL)
        return str(decision)

    def _judge(self, places: dict[int, list[int]]) -> str:
        """Whether all have stopped at the same place; if not, why that is refused."""
        missing = [rank for rank in range(self._num_ranks) if rank not in places]
        if missing:
            return (
                f"{self._name(missing[0])} has not stopped with an error, so ranks may be at different steps. "
                f"{self._way_out()}"
            )
        first, own = min(places.items())
        rank, other = next((one for one in sorted(places.items()) if one[1] != own), (first, own))
        if own == other:
            return _AGREED
        return (
            f"{self._name(first)} has stopped after step {own[0]} in its batch {own[1]}, {self._name(rank)} after step "
            f"{other[0]} in its batch {other[1]}. {self._way_out()}"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._failures.monitor.members[rank].place})"

    def _way_out(self) -> str:
        newest = self._newest()
        return "No checkpoint was saved before." if newest is None else f"Resume from {newest}, which was saved before."


class _AgreedHook:
    """Takes the place of a callback's `on_exception`. Copies of the callback have its own again."""

    __name__ = "on_exception"

    def __init__(self, hook: Callable[..., object], saves: SavesOnException) -> None:
        self._hook = hook
        self._saves = saves

    def __call__(self, trainer: "pl.Trainer", module: "pl.LightningModule", exception: BaseException) -> None:
        callback = getattr(self._hook, "__self__", None)
        if isinstance(callback, ModelCheckpoint) and not callback.save_on_exception:
            self._hook(trainer, module, exception)
        else:
            self._saves.save(self._hook, exception, trainer, module)

    def __reduce__(self) -> Any:
        return _itself, (self._hook,)


class _Shown:
    """Takes the place of a function that is called after an error. What goes wrong in it is shown in one line."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", "on_exception")  # a partial has none

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._function(*args, **kwargs)
        except Exception as error:
            owner = type(getattr(self._function, "__self__", None)).__name__
            line = str(error).partition("\n")[0]
            print(f"{owner}.{self.__name__} failed, too: {type(error).__name__}: {line}", file=sys.stderr)

    def __reduce__(self) -> Any:
        return _itself, (self._function,)


def _itself(hook: Any) -> Any:
    return hook
