"""Ranks that wait for a collective look at how far the others are: another one may be slow, or have passed it."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed import HashStore

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.failure import Failures
from lightning_hanayo.strategy.user_code import collectives
from lightning_hanayo.strategy.user_code.collectives import IN_HOOKS, Agreement, Call


@dataclass
class Run:
    """What an agreement asks about a run: `Failures` without its thread."""

    others: list[tuple[int, ...]] = field(default_factory=list)
    """how far rank 1 is, at one look after another"""
    position: tuple[int, ...] = (0, 0, 0, 0)
    store: Any = field(default_factory=HashStore)
    rank: int = 0
    run: int = 1

    def check_peers(self) -> None: ...

    def positions(self) -> dict[int, tuple[int, ...]]:
        if len(self.others) == 1:
            raise TimeoutError("has waited long enough")
        return {self.rank: self.position, 1 - self.rank: self.others.pop(0)}


def position(*, steps: int, hooks: int) -> tuple[int, ...]:
    """After so many steps of a batch, and hooks of all ranks."""
    run: Any = Run()
    for _ in range(steps):
        Failures.end_step(run)
    for _ in range(hooks):
        Failures.end_hook(run)
    return run.position


@pytest.mark.parametrize(
    ("own", "other", "error"),
    [
        (position(steps=0, hooks=0), position(steps=4, hooks=0), TimeoutError),
        (position(steps=0, hooks=1), position(steps=4, hooks=2), UnsupportedError),
    ],
    ids=["rank 1 has run steps, and is in the hook", "rank 1 has left the hook"],
)
def test_a_slow_rank_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, ...], other: tuple[int, ...], error: type[Exception]
) -> None:
    monkeypatch.setattr(collectives, "_LOOK", 1e-3)
    run: Any = Run([other] * 4, own)
    with pytest.raises(error):
        Agreement("world", [0, 1], run, IN_HOOKS).on(Call("strategy.barrier", "on_train_batch_end"))
