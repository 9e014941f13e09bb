"""Ranks that ask for different numbers of loaders get an error that says how many each of them has."""

from typing import Any

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy.lightning.loops import check_counts
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer


def test_equal_counts_are_accepted() -> None:
    check_counts("val_dataloader", [2, 2])


def test_different_counts_are_named_by_rank() -> None:
    with pytest.raises(HanayoError, match="val_dataloader gives ranks .*: 2 on rank 0, 1 on rank 1. .* as many on eac"):
        check_counts("val_dataloader", [2, 1])


class Uneven(models.Metrics):
    """The last rank validates on one loader more."""

    def val_dataloader(self) -> Any:
        last = self.trainer.global_rank == self.trainer.world_size - 1
        return [make_loader(models.vectors((4,))) for _ in range(2 if last else 1)]


def validate(layout: Layout) -> str:
    trainer = make_trainer(layout, strategy=make_strategy(layout))
    with pytest.raises(Exception) as caught:
        trainer.validate(models.build(Uneven))
    return str(caught.value)


@pytest.mark.parametrize(
    "layout", covered([Layout(1, data=2), Layout(2), Layout(2, data=2)], by=[Layout(1, data=2)]), ids=str
)
def test_all_ranks_name_the_one_with_another_number(pool: Pool, layout: Layout) -> None:
    last = layout.world_size - 1
    for message in pool.run(layout.world_size, validate, layout):
        assert "val_dataloader gives ranks different numbers of loaders: 1 on rank 0" in message
        assert f"2 on rank {last}" in message


def ask_early(layout: Layout) -> tuple[int, int]:
    """A loader that is asked for before any run, and used in one."""
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_steps=3)
    loader = trainer.strategy.process_dataloader(make_loader(models.vectors((4, 4))))
    trainer.fit(models.build(models.MLP), make_loader(models.vectors((4, 4, 4))))
    return len(loader), trainer.global_step  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", covered([Layout(), Layout(2)], by=[Layout()]), ids=str)
def test_loaders_can_be_asked_for_before_a_run(pool: Pool, layout: Layout) -> None:
    assert pool.run(layout.world_size, ask_early, layout) == [(2, 3)] * layout.world_size
