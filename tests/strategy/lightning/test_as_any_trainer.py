"""On one rank a user sees nothing but what any Trainer does: the same hooks, logs, files, states and errors.

observe(Trainer()) == observe(Trainer(strategy=HanayoStrategy(...)))
"""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hanayo import HanayoStrategy

Run = Callable[[Trainer, LightningModule], Any]
"""What a user does with a Trainer."""
Both = Callable[..., tuple[Any, Any]]


class Model(LightningModule):
    """Has no stack of blocks; logs in all ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.head = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).square().mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self(batch).square().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader() -> "DataLoader[Tensor]":
    samples = torch.arange(24.0).reshape(6, 4) / 24
    return DataLoader(samples, batch_size=2)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """Each run makes one; none is left for the next test."""
    environment = dict(os.environ)
    yield
    _destroy_dist_connection()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def both(tmp_path: Path) -> Both:
    """Does the same with a plain Trainer and with this strategy, and returns what came of it."""

    def observe(run: Run, model: type[LightningModule] = Model, **options: Any) -> tuple[Any, Any]:
        outcomes = []
        for strategy in ("auto", HanayoStrategy(pipeline_parallel_size=1, num_microbatches=1)):
            torch.manual_seed(0)
            outcomes.append(run(make_trainer(strategy, root=tmp_path / type(strategy).__name__, **options), model()))
        return outcomes[0], outcomes[1]

    return observe


def make_trainer(strategy: Any, root: Path, **options: Any) -> Trainer:
    """A Trainer that writes nothing unless it is asked to."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
    quiet |= {"enable_model_summary": False, "log_every_n_steps": 1}
    return Trainer(accelerator="cpu", devices=1, strategy=strategy, default_root_dir=root, **(quiet | options))


def fit(trainer: Trainer, module: LightningModule) -> None:
    trainer.fit(module, loader(), loader())


# hooks


class _BatchTransfer:
    """The hooks that each batch passes on its way to the device."""

    on_before_batch_transfer = DataHooks.on_before_batch_transfer
    transfer_batch_to_device = DataHooks.transfer_batch_to_device
    on_after_batch_transfer = DataHooks.on_after_batch_transfer


def noting(calls: list[str], base: type, hooks: type) -> type:
    """A subclass of `base` that notes the names of those hooks, and calls them."""

    def hook_of(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{base.__name__}.{name}")
            return getattr(base, name)(self, *args, **kwargs)

        return hook

    public = [name for name, value in vars(hooks).items() if not name.startswith("_") and callable(value)]
    names = [name for name in public if name != "configure_sharded_model"]  # no module may define it any more
    return type(base.__name__, (base,), {name: hook_of(name) for name in names})


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_hooks_of_module_and_callbacks_come_in_the_same_order(both: Both, name: str) -> None:
    def hooks_of(trainer: Trainer, _: LightningModule) -> list[str]:
        calls: list[str] = []
        model: type = Model
        for hooks in (ModelHooks, CheckpointHooks, _BatchTransfer):
            model = noting(calls, model, hooks)
        trainer.callbacks.append(noting(calls, Callback, Callback)())  # type: ignore[attr-defined]
        getattr(trainer, name)(model(), *[loader()] * (2 if name == "fit" else 1))
        return calls

    plain, ours = both(hooks_of)
    assert ours == plain
    assert len(plain) > 20


class Backward(Model):
    """Notes what is done with the loss and the optimizer, and around the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls.append("step")
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        super().backward(loss, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("optimizer step")
        super().optimizer_step(*args, **kwargs)

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("zero grad")
        super().optimizer_zero_grad(*args, **kwargs)


def test_backward_and_optimizer_are_called_as_often_and_in_the_same_order(both: Both) -> None:
    plain, ours = both(
        lambda trainer, module: fit(trainer, module) or module.calls, Backward, accumulate_grad_batches=2
    )
    assert ours == plain


# what is computed


def test_weights_are_equal_to_the_last_bit(both: Both) -> None:
    def weights(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
        fit(trainer, module)
        return module.state_dict()

    plain, ours = both(weights)
    assert all(torch.equal(ours[name], value) for name, value in plain.items())


def test_metrics_of_all_kinds_are_equal(both: Both) -> None:
    def metrics(trainer: Trainer, module: LightningModule) -> list[dict[str, float]]:
        fit(trainer, module)
        kinds = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
        return [{name: float(value) for name, value in kind.items()} for kind in kinds]

    plain, ours = both(metrics)
    assert ours == plain


def test_results_of_evaluation_and_predictions_are_equal(both: Both) -> None:
    def results(trainer: Trainer, module: LightningModule) -> list[Any]:
        predictions = trainer.predict(module, loader())
        assert predictions is not None
        evaluated = [trainer.validate(module, loader(), verbose=False), trainer.test(module, loader(), verbose=False)]
        return [*evaluated, [prediction.tolist() for prediction in predictions]]

    plain, ours = both(results)
    assert ours == plain


# what is written


class CallLogger(DummyLogger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.calls.append((metrics, step))

    def finalize(self, status: str) -> None:
        self.calls.append(status)


def test_a_logger_is_told_the_same(both: Both) -> None:
    def told(trainer: Trainer, module: LightningModule) -> list[Any]:
        trainer.logger = logger = CallLogger()
        fit(trainer, module)
        return logger.calls

    plain, ours = both(told)
    assert ours == plain


def test_checkpoints_have_the_same_names_keys_and_values(both: Both) -> None:
    def checkpoints(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        trainer.callbacks.append(ModelCheckpoint(monitor="val_loss", save_top_k=-1, save_last=True))  # type: ignore
        fit(trainer, module)
        paths = sorted(Path(trainer.default_root_dir).rglob("*.ckpt"))
        return {path.name: torch.load(path, weights_only=False) for path in paths}

    plain, ours = both(checkpoints, enable_checkpointing=True)
    assert list(ours) == list(plain)
    for name, checkpoint in plain.items():
        assert set(checkpoint) <= set(ours[name])
        torch.testing.assert_close(ours[name]["state_dict"], checkpoint["state_dict"], rtol=0, atol=0)
        assert ours[name]["loops"] == checkpoint["loops"]


def test_a_plain_trainer_resumes_where_this_strategy_stopped(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    ours = make_trainer(HanayoStrategy(pipeline_parallel_size=1, num_microbatches=1), tmp_path, max_epochs=1)
    fit(ours, Model())
    ours.save_checkpoint(path)
    resumed, straight = Model(), Model()
    make_trainer("auto", tmp_path).fit(resumed, loader(), loader(), ckpt_path=path)
    fit(make_trainer("auto", tmp_path), straight)
    assert torch.equal(resumed.head.weight, straight.head.weight)


# how it ends


class Fails(Model):
    """Raises in the third training step."""

    error: type[BaseException] = RuntimeError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise self.error("by the user")
        return super().training_step(batch, batch_idx)


class _Silent(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)


def test_a_compiled_module_runs_compiled_and_stays_so(both: Both) -> None:
    def compiled(trainer: Trainer, module: LightningModule) -> tuple[bool, bool, list[Tensor]]:
        graphs: list[Any] = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        fit(trainer, torch.compile(module, backend=backend))  # type: ignore[arg-type]
        return bool(graphs), to_uncompiled(module) is module, list(module.parameters())

    plain, ours = both(compiled, _Silent)
    assert ours[:2] == plain[:2] == (True, True)
    assert all(map(torch.equal, ours[2], plain[2]))


class _SavesInMidEpoch(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(trainer.default_root_dir + "/mid.ckpt")


class _NotesRestarts(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(("batch", trainer.fit_loop.restarting))

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(("validation", trainer.fit_loop.restarting))

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(("epoch", trainer.fit_loop.restarting))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_a_run_that_resumes_in_mid_epoch_says_so_until_the_epoch_ends(both: Both) -> None:
    def restarts(trainer: Trainer, module: LightningModule) -> list[tuple[str, bool]]:
        trainer.callbacks.append(_SavesInMidEpoch())  # type: ignore[attr-defined]
        fit(trainer, module)
        notes, strategy = _NotesRestarts(), type(trainer.strategy)()
        second = make_trainer(strategy if isinstance(strategy, HanayoStrategy) else "auto", trainer.default_root_dir)
        second.callbacks.append(notes)  # type: ignore[attr-defined]
        second.fit(Model(), loader(), loader(), ckpt_path=trainer.default_root_dir + "/mid.ckpt")
        return notes.seen

    plain, ours = both(restarts)
    assert ours == plain
    assert ("epoch", True) in plain and ("epoch", False) in plain


class _CopiesCallbacks(Callback):
    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.copies = deepcopy(trainer.callbacks)  # type: ignore[attr-defined]


def test_callbacks_that_hold_the_trainer_can_be_copied_in_a_run(both: Both) -> None:
    def copied(trainer: Trainer, module: LightningModule) -> tuple[list[str], list[Tensor]]:
        trainer.callbacks.append(copies := _CopiesCallbacks())  # type: ignore[attr-defined]
        fit(trainer, module)
        return [type(one).__name__ for one in copies.copies], list(module.parameters())

    plain, ours = both(copied, enable_progress_bar=True)
    assert ours[0] == plain[0]
    assert any("ProgressBar" in name for name in plain[0])  # which holds the Trainer
    assert all(map(torch.equal, ours[1], plain[1]))


def test_an_error_leaves_the_same_state_and_reaches_the_callbacks(both: Both) -> None:
    def state(trainer: Trainer, module: LightningModule) -> list[Any]:
        told: list[str] = []
        trainer.callbacks.append(noting(told, Callback, Callback)())  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="by the user") as caught:
            fit(trainer, module)
        return [told, trainer.state.status, trainer.global_step, trainer.training, str(caught.value)]

    plain, ours = both(state, Fails)
    assert ours == plain
    assert "Callback.on_exception" in plain[0]


def test_the_same_trainer_fits_again_after_an_error(both: Both) -> None:
    def fit_again(trainer: Trainer, module: LightningModule) -> Tensor:
        with pytest.raises(RuntimeError, match="by the user"):
            fit(trainer, module)
        again = Model()
        fit(trainer, again)
        return again.head.weight

    plain, ours = both(fit_again, Fails)
    assert torch.equal(ours, plain)


def test_no_thread_and_no_other_signal_handler_is_left(both: Both) -> None:
    def left(trainer: Trainer, module: LightningModule) -> list[Any]:
        threads = set(threading.enumerate())
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        fit(trainer, module)
        now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return [set(threading.enumerate()) - threads, now == handlers]

    plain, ours = both(left)
    assert ours == plain == [set(), True]


def test_the_module_is_as_it_was(both: Both) -> None:
    def left(trainer: Trainer, module: LightningModule) -> list[Any]:
        own, forward = set(vars(module)), module.training_step.__func__  # type: ignore[attr-defined]
        fit(trainer, module)
        kept = set(vars(module)) - own
        return [kept, module.training_step.__func__ is forward, [p.grad is None for p in module.parameters()]]

    plain, ours = both(left)
    assert ours == plain


# what is said


def test_the_user_reads_the_same_warnings(both: Both) -> None:
    def said(trainer: Trainer, module: LightningModule) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(torch.ones(3, 4), shuffle=True), DataLoader(torch.ones(3, 4), shuffle=True))
        return [str(warning.message) for warning in caught]

    plain, ours = both(said, num_sanity_val_steps=0)
    assert ours == plain


def test_the_trainer_says_the_same_of_its_devices(both: Both) -> None:
    def devices(trainer: Trainer, module: LightningModule) -> list[Any]:
        fit(trainer, module)
        ranks = [trainer.world_size, trainer.num_devices, trainer.global_rank, trainer.local_rank, trainer.node_rank]
        return [*ranks, trainer.is_global_zero, trainer.strategy.root_device, trainer.num_nodes]

    plain, ours = both(devices)
    assert ours == plain


class ReturnsNumber(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return 5.0


def test_a_step_without_a_loss_is_refused_in_lightnings_words(both: Both) -> None:
    def refused(trainer: Trainer, module: LightningModule) -> str:
        with pytest.raises(MisconfigurationException) as caught:
            fit(trainer, module)
        return str(caught.value)

    plain, ours = both(refused, ReturnsNumber)
    assert ours == plain
