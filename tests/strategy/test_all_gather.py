"""`self.all_gather` in a step and at an epoch's end: over the ranks that see other samples, and nobody waits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)


class Gathers(models.MLP):
    """Gathers what says whose it is, with a gradient in the step, and what the epoch has collected."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[Any, ...] = ()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        means = self.all_gather(loss, sync_grads=True)
        ranks = self.all_gather({"rank": self.trainer.global_rank})["rank"].tolist()  # type: ignore[call-overload]
        self.seen = (*self.seen, [*means.shape, *ranks])
        return loss + 0.1 * means.mean()

    def on_train_epoch_end(self) -> None:
        self.seen = (*self.seen, self.all_gather(torch.tensor(self.trainer.global_rank)).tolist())  # type: ignore[union-attr]


class Contrasts(models.MLP):
    """A loss between all ranks' samples."""

    def loss(self, batch: Batch) -> Tensor:
        own = self(batch["x"])
        everybody = self.all_gather(own, sync_grads=True)
        assert isinstance(everybody, Tensor)
        return (own[:, None] - everybody.flatten(0, -2)[None]).square().mean()


def contrasts(layout: Layout) -> Outcome:
    callback = OutcomeCallback()
    options = {"strategy": make_strategy(layout)} if layout.world_size > 1 else {}
    trainer = make_trainer(layout, max_steps=2, callbacks=[callback], **options)
    (batch,) = models.vectors((4,), torch.float64)
    share = {name: value[data_rank(layout) :: layout.data] for name, value in batch.items()}
    trainer.fit(models.build(Contrasts, torch.float64), make_loader([share] * 2))
    return callback.outcome


def test_gradients_flow_back_to_where_a_value_came_from(pool: Pool) -> None:
    layout = Layout(2, 1, 2, num_microbatches=1)
    (expected,) = pool.run(1, contrasts, Layout())
    outcome = merge(pool.run(4, contrasts, layout), layout)
    assert_close(outcome.gradients, expected.gradients, 1e-10)


def gathers(layout: Layout) -> tuple[Any, ...]:
    (batch,) = models.vectors((8,))
    module = models.build(Gathers)
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_epochs=1)
    share = {name: value[data_rank(layout) :: layout.data] for name, value in batch.items()}
    trainer.fit(module, make_loader([share]))
    assert isinstance(module, Gathers)
    return module.seen


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(2, 1, 1), Layout(1, 1, 1, cube=(1, 2, 1))], ids=str)
def test_gathers_over_the_ranks_with_other_samples(pool: Pool, layout: Layout) -> None:
    def groups(*axes: str) -> dict[int, list[int]]:
        return {rank: list(ranks) for ranks in layout.topology.groups(*axes) for rank in ranks}

    in_steps, in_hooks = groups("data", "x", "y", "z"), groups("data")
    for rank, seen in enumerate(pool.run(layout.world_size, gathers, layout, timeout=30.0)):
        *steps, end = seen
        first = layout.topology.coordinates(rank)[1] == 0
        assert steps == [[len(in_steps[rank]), *in_steps[rank]]] * (4 if first else 0)
        assert end == in_hooks[rank]


class GathersAlone(models.MLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        gathered = self.all_gather(loss)
        assert isinstance(gathered, Tensor) and torch.equal(gathered, loss)
        return loss


def gathers_alone() -> int:
    strategy = make_strategy(Layout(1, 1, 1, "1f1b"))
    trainer = make_trainer(Layout(), strategy=strategy, max_epochs=1)
    trainer.fit(models.build(GathersAlone), make_loader(models.vectors((8,))))
    return trainer.global_step


def test_a_world_of_one_rank_adds_no_dimension(pool: Pool) -> None:
    assert pool.run(1, gathers_alone) == [1]
