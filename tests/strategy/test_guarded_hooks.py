"""The user's hooks run with guarded parameters; Lightning's own, and Lightning's view of hooks, stay as they are."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hanayo.partition.guards import ParameterGuard
from lightning_hanayo.strategy.guarded_hooks import guard_hooks, guarded_step_hooks
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.topology import Topology

GUARD = ParameterGuard(torch.device("cpu"))


def seen() -> tuple[str, str]:
    return GUARD.scope, GUARD.hook_name


class Module(LightningModule):
    def on_train_batch_end(self, *_: Any) -> Any:
        return self, seen()

    def on_validation_epoch_end(self) -> Any:
        return seen()

    def configure_optimizers(self) -> Any:
        return seen()

    def backward(self, *_: Any) -> Any:
        return seen()

    def optimizer_zero_grad(self, *_: Any) -> Any:
        return seen()

    def lr_scheduler_step(self, *_: Any) -> Any:
        return seen()


class Own(Callback):
    def on_train_start(self, *_: Any) -> Any:
        return seen()


@pytest.fixture
def trainer() -> Mock:
    by_function = LambdaCallback(on_train_end=lambda *_: seen())
    return Mock(lightning_module=Module(), callbacks=[Own(), by_function, ModelCheckpoint()])


def guarded(trainer: Mock, num_pipe_ranks: int = 2) -> TemporaryAttributes:
    run: Any = SimpleNamespace(trainer=trainer, module=trainer.lightning_module, guard=GUARD, pipe_rank=0)
    run.attributes, run.topology = TemporaryAttributes(), Topology(pipe=num_pipe_ranks)
    guard_hooks(run)
    return run.attributes  # type: ignore[no-any-return]


def test_hooks_of_module_and_callbacks_are_guarded(trainer: Mock) -> None:
    guarded(trainer)
    own, by_function, checkpoint = trainer.callbacks
    assert trainer.lightning_module.on_train_batch_end(1, 2)[1] == ("hook", "on_train_batch_end")
    assert own.on_train_start() == ("hook", "on_train_start")
    assert by_function.on_train_end(1, 2) == ("hook", "on_train_end")
    assert "on_train_batch_end" not in vars(checkpoint) and "on_train_end" not in vars(own)
    assert seen() == ("off", "")


@pytest.mark.parametrize("name", ["configure_optimizers", "backward", "optimizer_zero_grad", "lr_scheduler_step"])
def test_overrides_of_lightnings_own_steps_are_guarded(trainer: Mock, name: str) -> None:
    guarded(trainer)
    assert getattr(trainer.lightning_module, name)() == ("hook", name)


@pytest.mark.parametrize(("num_pipe_ranks", "scope"), [(2, "alone"), (1, "hook")])
def test_hooks_that_need_data_run_on_the_first_rank_alone(trainer: Mock, num_pipe_ranks: int, scope: str) -> None:
    guarded(trainer, num_pipe_ranks)
    assert trainer.lightning_module.on_validation_epoch_end()[0] == scope


def test_lightning_sees_which_hooks_are_overridden(trainer: Mock) -> None:
    attributes = guarded(trainer)
    module = trainer.lightning_module
    assert is_overridden("on_train_batch_end", module) and not is_overridden("on_train_batch_start", module)
    attributes.restore()
    assert "on_train_batch_end" not in vars(module) and "log" not in vars(module)


def test_copies_call_their_own_hooks(trainer: Mock) -> None:
    guarded(trainer)
    for twin in (copy.deepcopy(trainer.lightning_module), pickle.loads(pickle.dumps(trainer.lightning_module))):
        assert twin.on_train_batch_end()[0] is twin


def test_hooks_on_the_optimizers_steps_are_guarded_but_for_our_own() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    scopes = []
    before = optimizer.register_step_pre_hook(lambda *_: scopes.append(GUARD.scope))
    optimizer.register_step_post_hook(lambda *_: (scopes.append(GUARD.scope), before.remove()))
    own = lambda *_: scopes.append(GUARD.scope)  # noqa: E731
    own.__module__ = "lightning_hanayo.strategy.optimizer_steps"
    optimizer.register_step_post_hook(own)
    for _ in range(2):
        with guarded_step_hooks(optimizer, GUARD):
            optimizer.step()
        optimizer.step()
    assert scopes == ["hook", "hook", "off"] + ["off", "off"] + ["hook", "off"] + ["off", "off"]
