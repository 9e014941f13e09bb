"""How many nodes a run has: as many as the Trainer was given, or fewer if torchrun goes on without some."""

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment  # type: ignore[attr-defined]

from lightning_hanayo.strategy.lightning.parallel_strategy import _nodes_found


@pytest.mark.parametrize(
    ("world_size", "wanted", "found"),
    [
        (16, 2, 2),
        (8, 2, 1),
        (24, 4, 3),
        (32, 2, 2),  # more than the Trainer was given: Lightning says that they don't agree
        (12, 2, 2),  # no whole number of nodes
    ],
)
def test_torchrun_says_how_many_nodes_are_left(
    monkeypatch: pytest.MonkeyPatch, world_size: int, wanted: int, found: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert _nodes_found(TorchElasticEnvironment(), wanted, num_processes=8) == found


def test_other_launchers_start_what_the_trainer_was_given() -> None:
    assert _nodes_found(LightningEnvironment(), 2, num_processes=8) == 2
