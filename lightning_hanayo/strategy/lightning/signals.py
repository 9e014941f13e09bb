"""Signals: keeps Lightning from issuing collectives when a rank receives SIGTERM."""

from typing import Any

import lightning.pytorch as pl

from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def keep_sigterm_local(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Issue no collective for SIGTERM, neither before each batch nor in the signal's handler.

    The first drains the pipeline with a host sync per batch (Lightning issue #21487); the second hangs all ranks that
    the signal meets in different places (#20806). A rank that got the signal leaves after its batch, the others follow.
    """

    def note(signum: int, _: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not trainer.received_sigterm:
            launcher.kill(signum)
        trainer._signal_connector.received_sigterm = True

    attributes.set(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", _no_op)
    attributes.set(trainer._signal_connector, "_sigterm_notifier_fn", note)


def _no_op() -> None:
    """A function of this module, so that a patched loop can be pickled."""
