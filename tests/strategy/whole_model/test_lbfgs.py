"""LBFGS takes the same steps on every layout, and goes on from a checkpoint of any."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.whole_model.lbfgs import joined, split, use_whole_model
from lightning_hanayo.topology import Topology
from tests.harness import models
from tests.harness.models import MLP, build
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)

BOUND = 1e-12
"""relative to the largest weight, in fp64: products are summed in another order"""
ONE, PIPE, DATA, CUBE = Layout(), Layout(2), Layout(2, data=2), Layout(2, cube=(2, 1, 1))


class Searching(MLP):
    """Finds the length of each step by a line search."""

    search: str | None = "strong_wolfe"

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.5, max_iter=4, history_size=3, line_search_fn=self.search)


class Fixed(Searching):
    """Takes steps of one length."""

    search = None


class HeadAlone(Searching):
    """Trains what pipeline rank 0 has."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.head.parameters())


def train(
    make: type[Searching],
    layout: Layout,
    steps: int,
    saved: Path | None = None,
    resume: Path | None = None,
    is_full: bool = False,
) -> Outcome:
    """Train on one rank."""
    callback = OutcomeCallback()
    uses_files = saved is not None or resume is not None
    options = {"strategy": make_strategy(layout, save_full=is_full)} if uses_files else {}
    trainer = make_trainer(layout, **options, max_steps=steps, callbacks=[callback])
    share = slice(data_rank(layout), None, layout.data)
    batches = models.vectors((8, 8), torch.float64)  # an epoch
    cut = [{name: value[share] for name, value in batch.items()} for batch in batches]
    trainer.fit(build(make, torch.float64), make_loader(cut), ckpt_path=resume)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return callback.outcome


def assert_equal(found: Outcome, expected: Outcome) -> None:
    largest = max(float(value.abs().max()) for value in expected.weights.values())
    for name, value in expected.weights.items():
        assert (found.weights[name] - value).abs().max() <= BOUND * largest, name


@pytest.mark.parametrize(
    ("make", "layout"),
    covered(
        [(make, layout) for make in (Searching, Fixed) for layout in (PIPE, DATA, CUBE, Layout(2, 2))],
        by=[(Searching, DATA)],
    ),
    ids=str,
)
def test_all_layouts_take_the_same_steps(pool: Pool, make: type[Searching], layout: Layout) -> None:
    (expected,) = pool.run(1, train, make, ONE, 3)
    found = merge(pool.run(layout.world_size, train, make, layout, 3), layout)
    assert_equal(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("writer", "reader"), [(PIPE, PIPE), (PIPE, CUBE), (CUBE, DATA), (DATA, ONE), (ONE, PIPE)])
def test_another_layout_goes_on_from_a_checkpoint(
    pool: Pool, tmp_path: Path, writer: Layout, reader: Layout, is_full: bool
) -> None:
    (expected,) = pool.run(1, train, Searching, ONE, 4)
    saved = tmp_path / "saved.ckpt"
    pool.run(writer.world_size, train, Searching, writer, 2, saved, None, is_full)
    found = merge(pool.run(reader.world_size, train, Searching, reader, 4, None, saved), reader)
    assert_equal(found, expected)


@pytest.mark.thorough
def test_a_rank_without_any_of_its_parameters_is_refused(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="LBFGS has none of the parameters of a rank"):
        pool.run(2, train, HeadAlone, PIPE, 1)


def test_data_ranks_whose_losses_count_differently_are_refused() -> None:
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    groups: Any = None
    with pytest.raises(UnsupportedError, match="this loss_weight gives each data rank another weight"):
        use_whole_model([optimizer], groups, Topology(data=2), number_of=None, by_samples=False)


def test_a_state_is_split_over_parameters_and_joined_again() -> None:
    """
    history        [8]               ->   first [3, 2]   second [2]
    """
    parameters = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.LBFGS(parameters, max_iter=3)
    optimizer.step(lambda: loss_of(optimizer, parameters))
    state = optimizer.state[parameters[0]]
    first, second = states = split(state, [(3, 2), (2,)])
    assert first["old_dirs.0"].shape == (3, 2) and second["old_dirs.0"].shape == (2,)
    back = joined(states)
    assert all(map(torch.equal, back["old_stps"], state["old_stps"])) and torch.equal(back["d"], state["d"])
    assert back["ro"] == [float(one) for one in state["ro"]] and back["n_iter"] == state["n_iter"]


def loss_of(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> float:
    optimizer.zero_grad()
    loss = sum(((p**2).sum() + (p**4).sum() for p in parameters), torch.zeros(()))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()
