"""A model that one rank holds whole trains as in any Trainer, with several data ranks as in DDP: nothing is cut.

rank 0   the user's step, in one piece          P = 1, no cube: no stack is needed
"""

import warnings
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_hanayo import HanayoStrategy
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered

WIDTH, STEPS, BATCH = 6, 4, 4


class Plain(LightningModule):
    """Without a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layer.register_forward_hook(lambda module, inputs, output: output * 2)

    def loss(self, x: Tensor) -> Tensor:
        return self.head(functional.gelu(self.layer(x))).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class Skips(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if batch_idx % 2 else None


class Words(Plain):
    """Its batches have no tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(torch.tensor([[float(len(word))] * WIDTH for word in batch["words"]], dtype=torch.float64))


class Lbfgs(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1)


class Iterates(Plain):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


class Adversaries(Plain):
    """Two optimizers, which the step drives; one accumulates the gradients of two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(first)
        self.manual_backward(-self.loss(batch))
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        with second.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                second.step()
                second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.layer, self.head)]


class Unused(Plain):
    """A data rank uses a parameter in batches in which the other one doesn't."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        uses = (batch_idx + self.global_rank) % 2
        return self.loss(self.other(batch) if uses else batch)


class Sparse(Plain):
    """Its table has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.words((8 * batch[:, 0].abs()).long()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class SkipsSome(Plain):
    """A micro-batch whose step returns None counts nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch[0, 0] < 0 else self.loss(batch)


class CountsSome(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        halves = batch.chunk(2)
        return sum(0.5 * (half[0, 0] >= 0) * self.loss(half) for half in halves)


class Perturbs(Plain):
    """Runs a backward of its own, whose gradients are zeroed after the step, and reads those of the last step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        last = sum(float(p.grad.sum()) for p in self.parameters() if p.grad is not None)
        x = batch.clone().requires_grad_()
        self.loss(x).backward()
        return (1 + last) * self.loss(batch + 0.1 * x.grad.sign())


class ReadsLastStep(Plain):
    """Its loss depends on what the last step has left, in gradients and in the optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        last = sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None)
        moments = sum(float(one["exp_avg"].sum()) for one in self.optimizers().state.values())  # type: ignore[union-attr]
        return (1 + last + moments + self.trainer.global_step) * self.loss(batch)


class LooksAtGradients(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert all(p.grad is None or p.grad.isfinite().all() for p in self.parameters())
        return self.loss(batch)


class Tracks(Plain):
    """Its step and a hook change buffers, which it reads; each data rank has other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("mean_loss", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.norm(batch) - self.center) * (1 + self.mean_loss)
        self.center.lerp_(batch.mean(0), 0.1)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < STEPS - 1:
            self.mean_loss = 0.5 * self.mean_loss + outputs["loss"]


class Wrong(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0.5


class SetsRate(Plain):
    """Sets the learning rate by the number of the step, as often as you like."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + self.global_step)  # type: ignore[union-attr]
        return self.loss(batch)


class StepsScheduler(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class StepsOptimizer(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.optimizers().step()  # type: ignore[union-attr,call-arg]
        return loss


class Singles(Plain):
    """Its batches are single samples of one dimension."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[None])


class BreaksTwice(Plain):
    """After the error of its step, it can't be moved either, as after an error of a GPU."""

    has_failed = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.has_failed = True
        raise KeyError("the first error")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.has_failed:
            raise RuntimeError("the second error")
        return super()._apply(fn, recurse)


ALIKE = [Plain, Skips, Words, Lbfgs, Iterates, Adversaries, Unused, Sparse, Perturbs, Tracks]
MORE = [
    BreaksTwice,
    ReadsLastStep,
    LooksAtGradients,
    SetsRate,
    StepsScheduler,
    StepsOptimizer,
    Singles,
    SkipsSome,
    CountsSome,
    Wrong,
]
MODELS = {one.__name__: one for one in [*ALIKE, *MORE]}


def loader(name: str) -> Any:
    if name == "Singles":
        return DataLoader(torch.linspace(-1, 1, STEPS * WIDTH, dtype=torch.float64).view(-1, WIDTH), batch_size=None)
    if name == "Words":
        return DataLoader([{"words": "a" * length} for length in range(2 * STEPS * BATCH)], batch_size=BATCH)
    return DataLoader(torch.linspace(-1, 1, 2 * STEPS * BATCH * WIDTH, dtype=torch.float64).view(-1, WIDTH), BATCH)


def train(name: str, devices: int, strategy: Any, accumulate: int = 1) -> list[float]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, limit_train_batches=STEPS, logger=False,
        accumulate_grad_batches=accumulate, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of Lightning, about skipped batches and iterators
        trainer.fit(model, loader(name))
    return torch.cat([one.detach().double().flatten() for one in (*model.parameters(), *model.buffers())]).tolist()


def strategy(data: int = 1, num_microbatches: int = 1) -> HanayoStrategy:
    return HanayoStrategy(1, data_parallel_size=data, num_microbatches=num_microbatches)


def both(name: str, data: int, peer: str) -> tuple[list[float], list[float]]:
    return train(name, data, strategy(data)), train(name, data, peer)


@pytest.mark.parametrize("name", [one.__name__ for one in ALIKE if one not in (Unused, Sparse)])
def test_one_rank_equals_any_trainer(pool: Pool, name: str) -> None:
    ((own, alone),) = pool.run(1, both, name, 1, "auto", timeout=60.0)
    assert own == alone


ON_DATA_RANKS = [one.__name__ for one in ALIKE if one not in (Skips, Perturbs)]


@pytest.mark.parametrize("name", covered(ON_DATA_RANKS, by=[one for one in ON_DATA_RANKS if one != "Lbfgs"]))
def test_data_ranks_equal_ddp(pool: Pool, name: str) -> None:
    results = pool.run(2, both, name, 2, "ddp_find_unused_parameters_true", timeout=60.0)
    assert results[0][0] == results[1][0]
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-12, abs=1e-14)


def skipping() -> tuple[list[float], list[float]]:
    return train("SkipsSome", 1, strategy(num_microbatches=2)), train("CountsSome", 1, "auto")


def test_a_skipped_microbatch_counts_nothing(pool: Pool) -> None:
    ((own, alone),) = pool.run(1, skipping, timeout=60.0)
    assert own == pytest.approx(alone, rel=1e-12)


def test_what_is_no_loss_is_refused_by_the_trainer(pool: Pool) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(1, train, "Wrong", 1, strategy(), timeout=60.0)
    assert caught.value.first.kind == "MisconfigurationException"


def test_the_first_error_is_the_one_that_is_raised(pool: Pool) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(1, train, "BreaksTwice", 1, strategy(), timeout=60.0)
    assert caught.value.first.kind == "KeyError"


def in_two(name: str, accumulate: int = 1) -> tuple[list[float], list[float]]:
    return train(name, 1, strategy(num_microbatches=2), accumulate), train(name, 1, "auto", accumulate)


@pytest.mark.parametrize("name", ["Adversaries", "Iterates", "Singles"])
def test_batches_that_can_not_be_cut_run_whole(pool: Pool, name: str) -> None:
    ((own, alone),) = pool.run(1, in_two, name, timeout=60.0)
    assert own == alone


@pytest.mark.parametrize("accumulate", [1, 2])
def test_micro_batches_see_what_the_last_step_has_left(pool: Pool, accumulate: int) -> None:
    """Not the gradients of the micro-batches before."""
    ((own, alone),) = pool.run(1, in_two, "ReadsLastStep", accumulate, timeout=60.0)
    assert own == pytest.approx(alone, rel=1e-12)


def in_two_on_data_ranks(name: str, accumulate: int) -> tuple[list[float], list[float]]:
    return train(name, 2, strategy(2, 2), accumulate), train(name, 2, "ddp_find_unused_parameters_true", accumulate)


@pytest.mark.parametrize(("name", "accumulate"), [("ReadsLastStep", 1), ("LooksAtGradients", 2)])
def test_so_do_they_on_data_ranks(pool: Pool, name: str, accumulate: int) -> None:
    results = pool.run(2, in_two_on_data_ranks, name, accumulate, timeout=60.0)
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-12)


def test_what_micro_batches_set_alike_is_as_in_one_process(pool: Pool) -> None:
    ((own, alone),) = pool.run(1, in_two, "SetsRate", timeout=60.0)
    assert own == pytest.approx(alone, rel=1e-12)


def test_a_scheduler_that_each_micro_batch_steps_is_refused(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="training_step changes an optimizer's options.*'interval': 'step'"):
        pool.run(1, train, "StepsScheduler", 1, strategy(num_microbatches=2), timeout=60.0)


def test_an_optimizer_that_each_micro_batch_steps_is_refused(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="training_step steps an optimizer.*runs for each micro-batch"):
        pool.run(1, train, "StepsOptimizer", 1, strategy(num_microbatches=2), timeout=60.0)
