"""All ranks validate after the same batch if `val_check_interval` is a time, which each rank measures by its own clock.

rank 0   59.998 s   not yet        rank 1   60.001 s   now        both   now

Also says when the validations of `fit` begin, to all ranks, whether they have batches for them or not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def validate_together(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Validate as soon as one rank would: its vote is asked for after each batch. Called by all ranks of several."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
        decide = partial(_as_one_rank, epoch_loop._should_check_val_fx, trainer)
        attributes.set(epoch_loop, "_should_check_val_fx", decide)


def before_validations(trainer: "pl.Trainer", attributes: TemporaryAttributes, call: Callable[[], object]) -> None:
    """Call `call` at the start of each validation of `fit`, until `attributes` are restored."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    attributes.set(loop, "run", partial(_after, call, loop.run))


def _after(call: Callable[[], object], run: Callable[[], Any]) -> Any:
    call()
    return run()


def _as_one_rank(decide: Any, trainer: "pl.Trainer", fetcher: Any) -> bool:
    return trainer.strategy.reduce_boolean_decision(decide(fetcher), all=False)
