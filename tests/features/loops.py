"""Features: the loops of a Trainer, and what limits them."""

from datetime import timedelta
from typing import Any

from lightning.pytorch.tuner import Tuner

from tests.features.feature import AsDDP, Equal, Feature, RefusedByLightning, on
from tests.features.net import Net, Sampled
from tests.features.trial import Trial, predict


def validate(trial: Trial) -> None:
    trial.record(results=trial.trainer.validate(trial.module, datamodule=trial.data, verbose=False))


def test(trial: Trial) -> None:
    trial.record(results=trial.trainer.test(trial.module, datamodule=trial.data, verbose=False))


def everything_after_fit(trial: Trial) -> None:
    trial.trainer.fit(trial.module, datamodule=trial.data)
    validate(trial)
    trial.record(tested=trial.trainer.test(trial.module, datamodule=trial.data, verbose=False))
    predict(trial)


def on_another_trainer(trial: Trial) -> None:
    trial.trainer.fit(trial.module, datamodule=trial.data)
    other = trial.make_trainer()
    trial.record(results=other.validate(trial.module, datamodule=trial.data, verbose=False))
    predict(trial, other)


def fit_twice(trial: Trial) -> None:
    trial.trainer.fit(trial.module, datamodule=trial.data)
    trial.trainer.fit_loop.max_epochs = 4
    trial.trainer.fit(trial.module, datamodule=trial.data)


def find_rate(trial: Trial) -> None:
    finder = Tuner(trial.trainer).lr_find(trial.module, datamodule=trial.data, num_training=20, update_attr=True)
    assert finder is not None
    trial.record(rates=finder.results["lr"], tried=finder.results["loss"], suggestion=trial.module.learning_rate)


def find_batch_size(trial: Trial) -> None:
    size = Tuner(trial.trainer).scale_batch_size(
        trial.module, datamodule=trial.data, init_val=2, max_trials=2, steps_per_trial=2
    )
    trial.record(size=size, of_data=trial.data.batch_size)


def predict_without_results(trial: Trial) -> None:
    assert trial.trainer.predict(trial.module, datamodule=trial.data, return_predictions=False) is None


class PredictsSome(Net):
    """Returns None for every other batch."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        predicted = super().predict_step(batch, batch_idx, dataloader_idx)
        return None if batch_idx % 2 else predicted


def predict_some(trial: Trial) -> None:
    predictions = trial.trainer.predict(trial.module, datamodule=trial.data)
    trial.record_samples("predictions", *(one for one in predictions or () if one is not None))


class Stops(Net):
    """Stops in a hook, in the second batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 1


class SkipsEpoch(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


FEATURES = [
    Feature("`trainer.fit`"),
    Feature("`trainer.validate` alone", script=validate, note="also the returned results"),
    Feature("`trainer.test` alone", script=test),
    Feature("`trainer.predict` alone", script=predict, note="predictions in the order of the loader"),
    Feature("`predict(return_predictions=False)`", script=predict_without_results),
    Feature(
        "a `predict_step` that returns `None` for some batches",
        module=PredictsSome,
        script=predict_some,
        note="`None` for some micro-batches of a batch, and values for others, are refused",
    ),
    Feature("`limit_predict_batches=1`", lambda _: {"limit_predict_batches": 1}, script=predict),
    Feature("`validate`, `test` and `predict` after `fit`", script=everything_after_fit),
    Feature("`validate` and `predict` on another Trainer, after `fit`", script=on_another_trainer),
    Feature("`fit` twice, with more epochs", script=fit_twice),
    Feature("`max_steps=4`", lambda _: {"max_steps": 4, "max_epochs": -1}),
    Feature("`min_epochs=2` and an earlier stop", lambda _: {"min_epochs": 2, "max_epochs": 3}, module=Stops),
    Feature(
        "`max_time`", lambda _: {"max_time": timedelta(seconds=0)}, note="ends after the batch in which it is over"
    ),
    Feature(
        "`limit_train_batches=2`, `limit_val_batches=0.5`",
        lambda _: {"limit_train_batches": 2, "limit_val_batches": 0.5},
    ),
    Feature("`limit_train_batches=0`", lambda _: {"limit_train_batches": 0}),
    Feature("`max_epochs=0`", lambda _: {"max_epochs": 0}),
    Feature("`limit_val_batches=0`", lambda _: {"limit_val_batches": 0}),
    Feature("`overfit_batches=2`", lambda _: {"overfit_batches": 2}, data=Sampled),
    Feature("`overfit_batches=0.5`", lambda _: {"overfit_batches": 0.5}, data=Sampled),
    Feature("`val_check_interval=0.34`", lambda _: {"val_check_interval": 0.34}),
    Feature(
        "`val_check_interval=2`, `check_val_every_n_epoch=None`",
        lambda _: {"val_check_interval": 2, "check_val_every_n_epoch": None},
    ),
    Feature("`check_val_every_n_epoch=2`", lambda _: {"check_val_every_n_epoch": 2}),
    Feature("`num_sanity_val_steps=-1`", lambda _: {"num_sanity_val_steps": -1}),
    Feature("`accumulate_grad_batches=2`", lambda _: {"accumulate_grad_batches": 2}),
    Feature("`accumulate_grad_batches=4`, more than an epoch has", lambda _: {"accumulate_grad_batches": 4}),
    Feature("`gradient_clip_val=0.1`", lambda _: {"gradient_clip_val": 0.1}, note="the norm over all ranks"),
    Feature(
        '`gradient_clip_algorithm="value"`',
        lambda _: {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    ),
    Feature("`fast_dev_run=True`", lambda _: {"fast_dev_run": True}),
    Feature("`barebones=True`", lambda _: {"barebones": True, "max_epochs": 2}),
    Feature("`detect_anomaly=True`", lambda _: {"detect_anomaly": True}),
    Feature("`trainer.should_stop` in a hook", module=Stops),
    Feature("`on_train_batch_start` returns -1", module=SkipsEpoch),
    Feature(
        "`Tuner.lr_find`",
        script=find_rate,
        outcomes=on(Equal(), AsDDP()),
        note="also the rates and losses that it tries: with data ranks those of rank 0's samples",
    ),
    Feature(
        "`Tuner.scale_batch_size`",
        script=find_batch_size,
        outcomes=on(Equal(), RefusedByLightning("not supported with distributed strategies")),
        note="also the size that it finds",
    ),
]
