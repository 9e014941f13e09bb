"""What is changed on the Trainer and the user's module for the time of a run."""

from typing import Any

import lightning.pytorch as pl

from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

_EVALUATION_ENDS = ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")


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

    attributes.set(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", _do_nothing)
    attributes.set(trainer._signal_connector, "_sigterm_notifier_fn", note)


def skip_hooks_without_data(module: "pl.LightningModule", attributes: TemporaryAttributes) -> None:
    """On a rank that gets no data, skip batch transfer and the ends of evaluation epochs.

    There is nothing to transfer, and no step has collected anything; metrics come from pipeline rank 0 anyway.
    """
    for hook in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
        attributes.set(module, hook, _return_batch)
    for hook in _EVALUATION_ENDS:
        attributes.set(module, hook, _do_nothing)


def _return_batch(batch: Any, *_: Any, **__: Any) -> Any:
    """A function of this module, so that the user's module can be pickled."""
    return batch


def _do_nothing() -> None:
    """A function of this module, so that the user's module can be pickled."""
