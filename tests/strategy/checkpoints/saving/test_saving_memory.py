"""While a checkpoint is saved, no rank holds more than its part, which is there already, and one tensor.

counted     storages of tensors that are made, and memory of Python objects: what is sent, hashed and written
"""

import tracemalloc
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hanayo.partition import guards
from tests.harness import models
from tests.harness.live_bytes import Live
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, data_rank, make_loader, make_strategy, make_trainer

LAYOUTS = [Layout(2, 2), Layout(1, cube=(1, 2, 1)), Layout(2, 1, 2), Layout(1, cube=(2, 2, 1))]
SLACK = 3_000_000
"""bytes of documents, of the manifest on rank 0, and the like"""


class Wide(models.MLP):
    """Eight blocks, with a matrix of 1 MB in each: no tensor is a large part of the model."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(16, 512), nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 16))


def peak_of(layout: Layout, path: Path) -> tuple[int, int, int, int]:
    """The most bytes of tensors and of objects that a save makes here, what the rank holds, and the largest tensor."""
    trainer = make_trainer(layout, max_steps=1, strategy=make_strategy(layout))
    module, (batch,) = models.build(Wide), models.vectors((8,))
    largest = max(parameter.nbytes for parameter in module.parameters())
    trainer.fit(module, make_loader([{key: value[data_rank(layout) :: layout.data] for key, value in batch.items()}]))
    with guards.released(module):
        leaves = tree_leaves([list(trainer.optimizers[0].state.values()), list(module.parameters())])
        held = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta]
        tracemalloc.start()
        with Live([*held, *module.buffers()]) as live:
            trainer.save_checkpoint(path)
        objects = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return live.peak, objects, sum(one.nbytes for one in held), largest


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=[LAYOUTS[1]]), ids=str)
def test_no_rank_holds_more_than_its_part_and_a_tensor(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    for tensors, objects, held, largest in pool.run(layout.world_size, peak_of, layout, tmp_path / "folder.ckpt"):
        assert tensors <= largest
        assert objects <= largest + SLACK < held
