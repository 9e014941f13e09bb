"""Ranks agree on a collective of user code before any of them issues it, so that none waits for one that doesn't come.

rank 0   all_gather of float32 [2], training_step, micro-batch 0 of 4   --+-- the same on both: it is issued
rank 2   all_gather of float32 [2], training_step, micro-batch 0 of 4   --+

rank 2   barrier, training_step, micro-batch 0 of 4                       different: an error on both ranks
rank 2   is in the next batch                                             an error on rank 0, within seconds
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.monitor.hangs.waiting import Waiting
from lightning_hanayo.strategy.failure import Failures

_LOOK = 1.0
"""seconds between two looks at how far the others are"""
WAY_OUT = (
    "All ranks with data must call the same collectives, in the same order, in as many micro-batches: not under a "
    "condition that differs between ranks, and with batches of equal sizes on all data ranks (drop_last=True)"
)


@dataclass(frozen=True)
class Call:
    """A collective that user code calls on one rank."""

    name: str
    """what was called, with options that must be the same"""
    place: str
    """where: the hook, or the step and its micro-batch"""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    num_samples: int = 1
    """of the samples that it is about, how many this rank has"""
    weighs: bool = True
    """whether the loss of these samples counts, so that a backward runs for it"""

    def __str__(self) -> str:
        what = "" if self.shape is None else f" of {self.dtype} {list(self.shape)}"
        return f"{self.name}{what} in {self.place}"

    def matches(self, other: "Call") -> bool:
        """Whether it is the same call. What a rank without samples passes doesn't matter."""
        alike = not (self.num_samples and other.num_samples) or (self.shape, self.dtype) == (other.shape, other.dtype)
        return alike and (self.name, self.place) == (other.name, other.place)


class Progress:
    """How far a rank is in its run: what others look at who wait for it. It is the same on all ranks that keep step."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures

    def begin_batch(self, *, trains: bool) -> None:
        """Called when a batch begins."""
        trained, evaluated, *_ = self._failures.position
        self._failures.position = (trained + 1, 0, 0, 0) if trains else (trained, evaluated + 1, 0, 0)

    def end_epoch(self) -> None:
        """Called when an epoch ends: data ranks may have evaluated different numbers of batches in it."""
        trained, evaluated, *_ = self._failures.position
        self._failures.position = (trained, (evaluated // _MANY + 1) * _MANY, 0, 0)

    def end_hook(self) -> None:
        """Called after a hook of the user's module that runs on all ranks."""
        trained, evaluated, hooks, _ = self._failures.position
        self._failures.position = (trained, evaluated, hooks + 1, 0)

    def end_step(self) -> None:
        """Called when a step has ended or is suspended."""
        trained, evaluated, hooks, steps = self._failures.position
        self._failures.position = (trained, evaluated, hooks, steps + 1)


IN_HOOKS = 3
"""how many numbers of a position tell ranks in hooks apart: only some of them run steps, and not equally many"""
_MANY = 2**32
"""more batches than one evaluation has"""


class Agreement:
    """One rank's side of it.

    They meet in the store, not in a collective: one that is never completed could not be left, either.

    Args:
        name: of what the ranks agree on together.
        ranks: those that call.
        failures: tell how far other ranks are, and whether one has failed.
        depth: how many numbers of their positions are the same where they make the same call; None: all.
    """

    def __init__(self, name: str, ranks: Sequence[int], failures: Failures, depth: int | None = None) -> None:
        self._key = f"hanayo/agreement/{failures.run}/{name}/{ranks[0]}"
        self.name = name
        self.ranks = list(ranks)
        self._failures = failures
        self._depth = depth
        self._store = failures.store
        self._count = 0

    def on(self, call: Call) -> list[Call]:
        """Return the call of each rank of the group.

        Raises:
            UnsupportedError: another rank calls something else, or nothing.
        """
        calls = self._exchange(call)
        present = next((i for i, one in enumerate(calls) if one.num_samples), 0)
        for rank, other in zip(self.ranks, calls, strict=True):
            if not calls[present].matches(other):
                raise UnsupportedError(
                    f"ranks {self.ranks[present]} and {rank} call different collectives: {calls[present]}, and "
                    f"{other}. {WAY_OUT}."
                )
        return calls

    def _exchange(self, call: Call) -> list[Call]:
        self._count += 1
        key, earlier = f"{self._key}/{self._count}", f"{self._key}/{self._count - 1}"
        try:
            self._store.set(f"{key}/{self._failures.rank}", json.dumps(asdict(call)))
            if self._store.add(f"{key}/arrived", 1) == len(self.ranks):
                self._store.set(f"{key}/all", "")
            with Waiting(call, self):
                self._wait(f"{key}/all", call)
            calls = [_call_of(json.loads(self._store.get(f"{key}/{rank}"))) for rank in self.ranks]
            for name in (self._failures.rank, "arrived", "all"):  # all have read those: they are here now
                self._store.delete_key(f"{earlier}/{name}")
        except RuntimeError as error:
            self._failures.on_transfer(error)
        return calls

    def _wait(self, key: str, call: Call) -> None:
        """Wait for the key, while no rank of the group is further than this one."""
        deadline, pause = time.monotonic() + _LOOK, 1e-4
        ahead: int | None = None
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(1.5 * pause, 2e-3)
            if time.monotonic() > deadline:
                earlier, ahead = ahead, self._rank_ahead()
                if ahead is not None and ahead == earlier:
                    raise self._not_called(ahead, call)
                deadline = time.monotonic() + _LOOK

    def _not_called(self, rank: int, call: Call) -> UnsupportedError:
        return UnsupportedError(f"rank {rank} has not called {call}, for which others wait. {WAY_OUT}.")

    def _rank_ahead(self) -> int | None:
        """A rank that has passed this point of the run.

        Raises:
            PeerFailed: a rank has failed.
        """
        self._failures.check_peers()
        own = self._failures.position[: self._depth]
        positions = self._failures.positions()
        return next((rank for rank in self.ranks if positions.get(rank, ())[: self._depth] > own), None)


def _call_of(fields: dict[str, Any]) -> Call:
    shape: Sequence[int] | None = fields.pop("shape")
    return Call(**fields, shape=None if shape is None else tuple(shape))
