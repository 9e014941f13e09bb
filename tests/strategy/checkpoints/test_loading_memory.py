"""While a checkpoint is loaded, no rank holds more than its part and one tensor, whatever wrote the checkpoint.

counted:     weights      copied into the part that is there: one tensor at a time
             optimizer    the rank's own states are made, and one tensor at a time
not counted: pages of files that are mapped into memory
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hanayo.dist_checkpointing.load_state import OptimizerState
from lightning_hanayo.strategy.checkpoints.load import KeptValues
from tests.harness import models
from tests.harness.live_bytes import Live
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer, unguarded
from tests.strategy.checkpoints.as_folder import as_folder

LAYOUTS = [Layout(2, 2, 1), Layout(1, cube=(1, 2, 1)), Layout(1, cube=(2, 2, 1)), Layout(2, 1, 2)]
SLACK = 20_000
"""bytes of scalars, of indices along dimensions, and the like"""


class Wide(models.MLP):
    """Eight blocks, with a matrix of 64 kB in each: no tensor is a large part of the model."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(16, 128), nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 16))


def save(path: Path) -> None:
    trainer = make_trainer(Layout(), max_epochs=1)
    trainer.fit(models.build(Wide), make_loader(models.vectors((8,))))
    trainer.save_checkpoint(path)


class Peaks:
    """The most bytes that were made while each part was loaded."""

    def __init__(self) -> None:
        self.weights = self.optimizer = 0

    def watch(self, owner: Any, method: str, name: str) -> Any:
        original = getattr(owner, method)

        def watched(this: Any, *arguments: Any) -> None:
            state = tree_leaves([vars(this)]) + tree_leaves([v for v in vars(this).values() if isinstance(v, dict)])
            known = [leaf for leaf in state if isinstance(leaf, Tensor) and not leaf.is_meta]
            known += arguments[0].state_dict().values() if name == "weights" else []
            with Live([one for one in known if type(one) is Tensor]) as live:
                original(this, *arguments)
            setattr(self, name, live.peak)

        return patch.object(owner, method, watched)


def peaks_of(layout: Layout, path: Path) -> tuple[int, int, int, int]:
    """Of this rank: peaks of loading, the bytes of its optimizer states, and of the model's largest tensor."""
    peaks = Peaks()
    trainer = make_trainer(layout, max_epochs=2, strategy=make_strategy(layout))
    module = models.build(Wide)
    largest = max(p.nbytes for p in module.parameters())
    with peaks.watch(KeptValues, "put_in", "weights"), peaks.watch(OptimizerState, "load", "optimizer"):
        trainer.fit(module, make_loader(models.vectors((8,))), ckpt_path=path)
    with unguarded(trainer):
        states = tree_leaves([list(trainer.optimizers[0].state.values())])
    own = sum(value.nbytes for value in states if isinstance(value, Tensor) and not value.is_meta)
    return peaks.weights, peaks.optimizer, own, largest


CASES = [(layout, kind) for layout in LAYOUTS for kind in ("plain", "folder")]
COVER = [(LAYOUTS[1], "folder")]


@pytest.mark.parametrize(("layout", "kind"), covered(CASES, by=COVER), ids=str)
def test_no_rank_holds_more_than_its_part_and_a_tensor(pool: Pool, tmp_path: Path, layout: Layout, kind: str) -> None:
    pool.run(1, save, tmp_path / "plain")
    as_folder(torch.load(tmp_path / "plain", weights_only=True), tmp_path / "folder", models.optimizer_names(Wide()))
    for weights, optimizer, own, largest in pool.run(layout.world_size, peaks_of, layout, tmp_path / kind):
        assert 0 < own <= optimizer <= own + largest + SLACK
        assert weights <= largest + SLACK
