"""Notes the order of all hooks of a module and of a callback, on rank 0."""

from typing import Any

from lightning import Callback, LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.features.net import Net
from tests.features.trial import Trial, fit, predict

DEPRECATED = {"configure_sharded_model"}
CALLBACK_HOOKS = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
MODULE_HOOKS = [
    name
    for kind in (ModelHooks, DataHooks, CheckpointHooks)
    for name in vars(kind)
    if not name.startswith("_") and name not in DEPRECATED
]


class Hooks:
    """The names of hooks in the order of their calls; repeats in a row count once."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, name: str) -> None:
        if self.names[-1:] != [name]:
            self.names.append(name)


class NotesHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.hooks = Hooks()


def _noting(name: str, original: Any) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.hooks.note(f"{'module' if isinstance(self, LightningModule) else 'callback'}.{name}")
        return original(self, *args, **kwargs)

    return hook


OTHER_HOOKS = [
    *("training_step", "validation_step", "predict_step", "backward", "configure_optimizers", "configure_callbacks"),
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
]
for _name in MODULE_HOOKS + OTHER_HOOKS:
    if hasattr(Net, _name) and not _name.endswith("_dataloader"):
        setattr(NotesHooks, _name, _noting(_name, getattr(Net, _name)))


class CallbackHooks(Callback):
    def __init__(self) -> None:
        self.hooks = Hooks()


for _name in CALLBACK_HOOKS:
    setattr(CallbackHooks, _name, _noting(_name, getattr(Callback, _name)))


def order_of_hooks(trial: Trial) -> None:
    """On rank 0, of the module and of a callback."""
    (callback,) = [one for one in trial.trainer.callbacks if isinstance(one, CallbackHooks)]
    callback.hooks = trial.module.hooks  # type: ignore[assignment]
    fit(trial)
    trial.trainer.validate(trial.module, datamodule=trial.data, verbose=False)
    predict(trial)
    if trial.trainer.is_global_zero:
        trial.record(hooks=callback.hooks.names)
