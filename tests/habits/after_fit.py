"""Habits: what scripts do after `fit`: the module is used and saved, trained again, or an error of a run is caught."""

import copy
import io
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_hanayo.errors import PeerFailed
from tests.habits.habit import EXACT, Habit, HabitOutcome, Refused, everywhere
from tests.harness import models
from tests.harness.checkpoints import read
from tests.harness.training import Layout, make_loader, make_trainer

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)
ENDED = Refused("and the run has ended.*gather_model", "and the run has ended ... gather_model")
FAILED = Refused("connections are closed since a run has failed")
STEPS = 2


def gathered(trainer: Trainer, module: LightningModule) -> LightningModule | None:
    """`gather_model`, if the Trainer runs on HanayoStrategy."""
    gather = getattr(trainer.strategy, "gather_model", copy.deepcopy)
    whole: LightningModule | None = gather(module)
    return whole


def keep_whole(trainer: Trainer, module: LightningModule, seen_by: LightningModule) -> None:
    """Let `seen_by` have seen the whole module's values."""
    whole = gathered(trainer, module)
    if whole is not None:
        object.__setattr__(seen_by, "seen", dict(whole.state_dict()))


def loader() -> DataLoader[Any]:
    return make_loader(VECTORS())


def other(layout: Layout) -> Layout:
    """A layout with as many ranks."""
    if layout.world_size == 1:
        return layout
    return Layout(layout.world_size, 1, 1) if layout.cube != (1, 1, 1) else Layout(cube=(1, layout.world_size, 1))


# after fit


def call_whole(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    whole = gathered(trainer, module)
    if whole is not None:
        with torch.no_grad():
            logits = whole(VECTORS()[0]["x"])
        object.__setattr__(module, "seen", {"logits": logits, **whole.state_dict()})


def save_whole(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    whole = gathered(trainer, module)
    if whole is not None:
        file = io.BytesIO()
        torch.save(whole, file)
        file.seek(0)
        object.__setattr__(module, "seen", torch.load(file, weights_only=False).state_dict())


def save_pretrained(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its thread never ends
    whole: Any = gathered(trainer, module)
    if whole is not None:
        with TemporaryDirectory() as folder:
            whole.model.save_pretrained(folder)
            again = type(whole.model).from_pretrained(folder)
        prompt = torch.tensor([[1, 2, 3]])
        made = {"text": whole.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)}
        object.__setattr__(module, "seen", made | dict(again.state_dict()))


def save_checkpoint(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            object.__setattr__(module, "seen", read(path)["state_dict"])


def count(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    object.__setattr__(module, "seen", {"parameters": sum(parameter.numel() for parameter in module.parameters())})


def load_whole(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    """Other values, on all ranks, and another run that trains them."""
    whole = gathered(trainer, module)
    state = None if whole is None else {name: value / 2 for name, value in whole.state_dict().items()}
    missing = module.load_state_dict(trainer.strategy.broadcast(state))
    assert missing == ([], [])
    fit_by_second(trainer, module, layout)


def call(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    module(VECTORS()[0]["x"])


def state_dict(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    torch.save(module.state_dict(), io.BytesIO())


def save(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    torch.save(module, io.BytesIO())


class LanguageModel(models.HuggingFace):
    """A model of transformers, with a loss in fp64."""

    def loss(self, batch: models.Batch) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        return functional.cross_entropy(logits.transpose(1, 2), batch["labels"])


def language_model() -> LightningModule:
    module: Any = models.gpt2()
    return LanguageModel(module.model)


class NormAtTheEnd(models.MLP):
    """Reads a norm of all weights when all is over."""

    def on_fit_end(self) -> None:
        self.norm = torch.stack([parameter.norm() for parameter in self.parameters()]).norm()


class GatheredInHook(models.MLP):
    """Looks at its whole self once per epoch."""

    seen: dict[str, Any]

    def on_train_epoch_end(self) -> None:
        call_whole(self.trainer, self, Layout())


def optimizer_state(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    torch.save(trainer.optimizers[0].state_dict(), io.BytesIO())


class SavedInHook(models.MLP):
    """Pickles itself."""

    def on_train_epoch_end(self) -> None:
        torch.save(self, io.BytesIO())


# the next run


class Validated(models.MLP):
    """Validates, too."""

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch["y"]))


def validate(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    (metrics,) = trainer.validate(module, loader(), verbose=False)
    object.__setattr__(module, "seen", dict(metrics))


def fit_again(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    trainer.fit_loop.epoch_loop.max_steps = 3 + STEPS
    trainer.fit_loop.max_epochs = None
    trainer.fit(module, loader())
    keep_whole(trainer, module, module)


def fit_by_second(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    second = make_trainer(layout, max_steps=STEPS)
    second.fit(module, loader())
    keep_whole(second, module, module)


def fit_on_other_layout(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    fit_by_second(trainer, module, other(layout))


def fit_plainly(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    make_trainer(Layout(), max_steps=STEPS).fit(module, loader())


def fit_whole_plainly(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    whole = gathered(trainer, module)
    if whole is not None:
        fit_plainly(trainer, whole, layout)
        object.__setattr__(module, "seen", dict(whole.state_dict()))


# errors that are caught


class Broken(models.MLP):
    """Its second step is an error."""

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise KeyError("broken")
        return super().training_step(batch, batch_idx)


class BrokenOnOneRank(models.MLP):
    """A hook is an error on the last rank alone."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == self.trainer.world_size - 1:
            raise KeyError("broken")


class Interrupted(models.MLP):
    """Someone presses Ctrl+C."""

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


class Unsupported(models.MLP):
    """Every layout refuses it in the first step, and one process as well."""

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        raise KeyError("broken")


def fit_after_error(
    broken: Callable[[], LightningModule], trainer: Trainer, module: LightningModule, layout: Layout
) -> None:
    """A run fails, and a script that catches the error trains a new module."""
    failing = models.build(broken, torch.float64)
    with suppress(Exception, SystemExit):  # on other ranks it is a PeerFailed; Lightning exits after Ctrl+C
        make_trainer(layout, max_steps=STEPS).fit(failing, loader())
    second, fresh = make_trainer(layout, max_steps=STEPS), models.build(models.MLP, torch.float64)
    second.fit(fresh, loader())
    keep_whole(second, fresh, module)


def gather_after_error(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    fit_after_error(Broken, trainer, module, layout)
    keep_whole(trainer, module, module)


def fit_failed_again(trainer: Trainer, module: LightningModule, layout: Layout) -> None:
    failing = models.build(Broken, torch.float64)
    with suppress(KeyError, PeerFailed):
        make_trainer(layout, max_steps=STEPS).fit(failing, loader())
    make_trainer(layout, max_steps=STEPS).fit(failing, loader())


def _after(
    name: str,
    after: Callable[[Trainer, LightningModule, Layout], None],
    outcomes: dict[str, HabitOutcome],
    model: Callable[[], LightningModule] = models.MLP,
    **options: Any,
) -> Habit:
    return Habit(name, model, VECTORS, outcomes, after=after, **options)


HABITS = [
    _after(
        "`gather_model()` after `fit`, called, and its `state_dict()`",
        call_whole,
        everywhere(EXACT),
        always_exact=True,
    ),
    _after("`torch.save` of what `gather_model()` returns", save_whole, everywhere(EXACT), always_exact=True),
    Habit(
        "`save_pretrained` and `generate` of what `gather_model()` returns",
        language_model,
        partial(models.windows, (8, 8, 6)),
        everywhere(EXACT),
        always_exact=True,
        after=save_pretrained,
    ),
    Habit("`gather_model()` in `on_train_epoch_end`", GatheredInHook, VECTORS, everywhere(EXACT), always_exact=True),
    _after("`trainer.save_checkpoint()` after `fit`", save_checkpoint, everywhere(EXACT), always_exact=True),
    _after("`module.load_state_dict()` of whole values after `fit`", load_whole, everywhere(EXACT), always_exact=True),
    _after("the number of parameters, counted after `fit`", count, everywhere(EXACT)),
    _after("`model(x)` after `fit`", call, everywhere(ENDED)),
    _after("`torch.save(model.state_dict())` after `fit`", state_dict, everywhere(ENDED)),
    _after("`torch.save(model)` after `fit`", save, everywhere(ENDED)),
    _after(
        "`optimizer.state_dict()` after `fit`", optimizer_state, everywhere(Refused("has on this rank only the states"))
    ),
    Habit("a norm of all weights in `on_fit_end`", NormAtTheEnd, VECTORS, everywhere(ENDED)),
    Habit(
        "`torch.save(self)` in a hook",
        SavedInHook,
        VECTORS,
        everywhere(Refused(r"\(torch.save\)|torch.save was called with", "... torch.save ...")),
    ),
    _after("`trainer.validate()` after `fit`", validate, everywhere(EXACT), Validated),
    _after("a second `fit` of the same Trainer", fit_again, everywhere(EXACT), always_exact=True),
    _after("a second Trainer for the same module", fit_by_second, everywhere(EXACT), always_exact=True),
    _after("a second Trainer with another layout", fit_on_other_layout, everywhere(EXACT), always_exact=True),
    _after("`Trainer(strategy='auto')` for the same module", fit_plainly, everywhere(ENDED)),
    _after("`Trainer(strategy='auto')` for what `gather_model()` returns", fit_whole_plainly, everywhere(EXACT)),
    _after(
        "an error in `training_step` is caught; then a new module is trained",
        partial(fit_after_error, Broken),
        everywhere(EXACT),
        always_exact=True,
    ),
    _after(
        "an error in a hook of one rank is caught; then a new module is trained",
        partial(fit_after_error, BrokenOnOneRank),
        everywhere(EXACT),
        always_exact=True,
    ),
    _after(
        "a refused module is caught in its first step; then a new one is trained",
        partial(fit_after_error, Unsupported),
        everywhere(EXACT),
        always_exact=True,
    ),
    _after(
        "Ctrl+C, whose `SystemExit` is caught; then a new module is trained",
        partial(fit_after_error, Interrupted),
        everywhere(EXACT),
    ),
    _after(
        "`gather_model()` after an error of another module's run",
        gather_after_error,
        everywhere(FAILED),
    ),
    _after("the module of a run that has failed is trained again", fit_failed_again, everywhere(FAILED)),
]
