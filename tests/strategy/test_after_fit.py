"""After a run the module is whole only in a copy; the next run, of any Trainer, takes it as it is or makes it whole.

Values of whole models, second Trainers and caught errors are compared in tests/habits/after_fit.py.
"""

import copy
import threading
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError, PeerFailed, UnsupportedError
from lightning_hanayo.partition.ownership import Placeholder
from lightning_hanayo.strategy.setup.prepared_model import PreparedModel
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer

PIPELINE, CUBE = Layout(2, 1, 1), Layout(cube=(1, 2, 1))


def fitted(layout: Layout, model: Any = models.MLP) -> tuple[Any, LightningModule]:
    """A strategy and its module, after two steps."""
    trainer, module = make_trainer(layout, max_steps=2), models.build(model)
    trainer.fit(module, make_loader(models.vectors((8, 8))))
    return trainer.strategy, module


class Odd(models.MLP):
    """Has what a state dict doesn't: a buffer that isn't saved, one that a block makes late, and a step's tensor."""

    def __init__(self) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            block.register_buffer("scale", torch.tensor(1.0 + index), persistent=False)
            block.register_buffer("late", None)
            block.up.weight.mark = index

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        self.kept = self.head(self.embedding(batch["x"]))
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        for index, block in enumerate(self.blocks):
            block.late = None if block.up.weight.is_meta else torch.tensor([float(index)])


def described(layout: Layout) -> dict[str, Any] | None:
    """What a whole copy consists of."""
    strategy, module = fitted(layout, Odd)
    if layout.world_size == 1:
        whole: Any = module
    else:
        whole = strategy.gather_model(module)
        if whole is not None:
            whole.requires_grad_(False).head.weight.zero_()  # the user's, so the module doesn't change
        again = strategy.gather_model()
        if whole is None:
            assert again is None
            return None
        assert whole is not module and whole.kept.grad_fn is None and not whole.head.weight.any()
        assert all(type(one) is nn.Parameter and vars(one).keys() <= {"mark"} for one in again.parameters())
        whole = again
    return {
        "classes": [type(one).__name__ for one in whole.modules()],
        "attributes": [sorted(vars(one)) for one in whole.modules()],
        "buffers": {name: value.tolist() for name, value in whole.named_buffers()},
        "marks": [block.up.weight.mark for block in whole.blocks],
        "sums": [round(one.sum().item(), 4) for one in whole.parameters()],
    }


@pytest.mark.parametrize("layout", [PIPELINE, CUBE], ids=str)
def test_a_gathered_copy_is_what_one_process_has(pool: Pool, layout: Layout) -> None:
    (expected,) = pool.run(1, described, Layout())
    assert pool.run(2, described, layout) == [expected, None]


def restored(layout: Layout) -> list[Tensor]:
    """The weights of a module that each run gives back whole, and what it computes, after one run and after two."""
    module, found = models.build(models.MLP, torch.float64), []
    batches: Any = models.vectors((8, 8), torch.float64)
    for steps in (1, 2):
        strategy = "auto" if layout.world_size == 1 else make_strategy(layout, restore_module=True)
        trainer = make_trainer(layout, max_steps=steps, strategy=strategy)
        trainer.fit(module, make_loader(batches))
        if strategy != "auto":
            assert (strategy.gather_model() is None) == (trainer.global_rank > 0)
            with pytest.raises(UnsupportedError, match="has made the module whole.* torch.save"):
                trainer.save_checkpoint("never.ckpt")
        assert all(type(one) is nn.Parameter and not vars(one) for one in module.parameters())
        found += [module.to("cpu")(batches[0]["x"]).detach(), *copy.deepcopy(module).state_dict().values()]
    return found


@pytest.mark.parametrize("layout", covered([PIPELINE, CUBE], by=[PIPELINE]), ids=str)
def test_a_restored_module_is_an_ordinary_one_on_every_rank(pool: Pool, layout: Layout) -> None:
    (expected,) = pool.run(1, restored, Layout())
    for own in pool.run(2, restored, layout):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


class GathersInStep(models.MLP):
    """Asks where only pipeline rank 0 could answer."""

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        strategy.gather_model()
        return super().training_step(batch, batch_idx)


def test_not_in_a_step(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="gather_model was called in a step, which runs on pipeline rank 0 alone"):
        pool.run(2, fitted, PIPELINE, GathersInStep)


def errors_of_gathering() -> list[str]:
    strategy, module = fitted(PIPELINE)
    texts = []
    with pytest.raises(HanayoError) as caught:
        strategy.gather_model(module.blocks)
    texts.append(str(caught.value))
    module.lock = threading.Lock()
    if module.global_rank > 0:
        assert strategy.gather_model() is None
        return texts
    with pytest.raises(UnsupportedError) as caught:
        strategy.gather_model()
    return [*texts, str(caught.value)]


def test_what_cant_be_gathered(pool: Pool) -> None:
    (other, copying), _ = pool.run(2, errors_of_gathering)
    assert "the LightningModule of the Trainer's last run, a MLP; got a ModuleList" in other
    assert "can't copy this MLP (TypeError: cannot pickle '_thread.lock' object)" in copying


def reused() -> tuple[bool, bool, bool]:
    """Whether a run of the same layout, of another Trainer, keeps the cut; and one on another layout."""
    _, module = fitted(PIPELINE)
    prepared, loader = PreparedModel.of(module), make_loader(models.vectors((8,)))
    make_trainer(PIPELINE, max_steps=1).fit(module, loader)
    same = PreparedModel.of(module) is prepared
    make_trainer(CUBE, max_steps=1).fit(module, loader)
    has_placeholders = any(isinstance(one, Placeholder) for one in module.parameters())
    return same, PreparedModel.of(module) is prepared, has_placeholders


def test_a_run_of_the_same_layout_reuses_the_cut(pool: Pool) -> None:
    assert pool.run(2, reused) == [(True, False, False)] * 2


def halved(gradient: Tensor) -> Tensor:
    return gradient / 2


halved.is_local = True  # type: ignore[attr-defined]


class Halved(models.MLP):
    """A hook on each parameter, which placeholders don't have."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(halved)


def on_another_layout() -> None:
    _, module = fitted(PIPELINE, Halved)
    make_trainer(CUBE, max_steps=1).fit(module, make_loader(models.vectors((8,))))


def test_hooks_on_parameters_dont_reach_another_layout(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="has a hook, which other ranks have lost"):
        pool.run(2, on_another_layout)


class FailsInSetup(models.MLP):
    def configure_optimizers(self) -> Any:
        raise KeyError("no optimizer")


def failed_module() -> list[str]:
    """What a module says whose run has failed, and a copy of it."""
    module, texts = models.build(FailsInSetup), []
    trainer = make_trainer(PIPELINE, max_steps=1)
    with pytest.raises(Exception, match="no optimizer"):
        trainer.fit(module, make_loader(models.vectors((8,))))
    strategy: Any = trainer.strategy
    for use in (
        strategy.gather_model,
        lambda: trainer.save_checkpoint("never.ckpt"),
        module.state_dict,
        copy.deepcopy(module).state_dict,
        lambda: PreparedModel.of(copy.deepcopy(module)).check(module),
    ):
        with pytest.raises(UnsupportedError) as caught:
            use()
        texts.append(str(caught.value))
    return texts


def test_the_module_of_a_failed_run(pool: Pool) -> None:
    for gathering, saving, *reading, copied in pool.run(2, failed_module):
        assert "connections are closed since a run has failed" in gathering == saving == copied
        assert all("and the run has ended (detach)" in one for one in reading)


class Keeps(models.MLP):
    """A block keeps another rank's weight in a list, until someone clears it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].kept = [self.blocks[0].up.weight]


def refused_then_corrected(layout: Layout) -> int:
    module: Any = models.build(Keeps)
    with pytest.raises(Exception, match="which belongs to pipeline rank 0"):
        make_trainer(layout, max_steps=1).fit(module, make_loader(models.vectors((8,))))
    module.blocks[2].kept.clear()
    trainer = make_trainer(layout, max_steps=2)
    trainer.fit(module, make_loader(models.vectors((8, 8))))
    return trainer.global_step


@pytest.mark.parametrize("layout", [PIPELINE, Layout(2, 1, 1, cube=(1, 2, 1))], ids=str)
def test_a_module_that_was_refused_before_its_cut_can_be_corrected(pool: Pool, layout: Layout) -> None:
    assert pool.run(layout.world_size, refused_then_corrected, layout) == [2] * layout.world_size


def loaded(only_on_rank_0: bool) -> list[str]:
    """What ranks say when values are loaded: into a part of the module, all of it, of wrong sizes, with `assign`.

    Afterwards rank 0 may load others alone.
    """
    strategy, module = fitted(PIPELINE)
    values = {name: torch.ones(one.shape) for name, one in module.blocks.named_parameters()}
    module.blocks.load_state_dict(values)
    missing = module.load_state_dict({}, strict=False).missing_keys
    assert missing == [name for name, _ in module.named_parameters()]
    texts = []
    with pytest.raises(RuntimeError) as wrong:
        module.blocks.load_state_dict({name: one.unsqueeze(0) for name, one in values.items()})
    assert str(wrong.value).count("size mismatch") == len(values)  # of other ranks' parameters, too
    with pytest.raises(UnsupportedError) as caught:
        module.load_state_dict({}, assign=True)
    texts.append(str(caught.value))
    whole = strategy.gather_model()
    if whole is not None:
        assert all(bool((one == 1).all()) for one in whole.blocks.parameters())
        assert "load_state_dict" not in vars(whole)
    if only_on_rank_0:
        if module.global_rank == 0:
            module.load_state_dict({}, strict=False)
        for use in (
            strategy.gather_model,
            lambda: module.trainer.save_checkpoint("never.ckpt"),
            lambda: make_trainer(PIPELINE, max_steps=1).fit(module, make_loader(models.vectors((8,)))),
        ):
            with pytest.raises((UnsupportedError, PeerFailed)) as caught:  # the run's error is one rank's
                use()
            texts.append(str(caught.value))
    return texts


def test_whole_values_are_loaded_after_a_run(pool: Pool) -> None:
    for (assigning,) in pool.run(2, loaded, False):
        assert "load_state_dict(assign=True) would make whole tensors the parameters of this MLP" in assigning


def test_values_that_one_rank_alone_has_loaded_are_refused(pool: Pool) -> None:
    for _, *refusals in pool.run(2, loaded, True):
        assert len(refusals) == 3
        assert all(
            "rank 0 has called load_state_dict between runs 4 times, but rank 1 3 times" in one for one in refusals
        )
