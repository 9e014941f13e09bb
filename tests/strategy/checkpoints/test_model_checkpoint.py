"""Each mode of `ModelCheckpoint` leaves the checkpoints, under the names, that it leaves after a plain Trainer's run.

plain Trainer                     P = 2                    D = 2, or a cube
epoch=0-step=2.ckpt   file        the same name, a folder  the same name, a folder
last.ckpt             file        the same name, a folder  ...
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout
from tests.strategy.checkpoints.saving_runs import MODES, Left, train_in

ALONE, PIPE, DATA, CUBE = Layout(), Layout(2), Layout(1, data=2), Layout(1, cube=(1, 2, 1))
COVER = [("a link to the last of the best", PIPE), ("resumed", CUBE)]


@pytest.fixture(scope="module")
def oracle(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Left]:
    """What a plain Trainer leaves in a mode."""

    @cache
    def left_in(mode: str) -> Left:
        (left,) = pool.run(1, train_in, mode, ALONE, tmp_path_factory.mktemp("alone"))
        return left

    return left_in


@pytest.mark.parametrize(("mode", "layout"), covered(product(MODES, (PIPE, DATA, CUBE)), by=COVER), ids=str)
def test_the_same_checkpoints_are_left_as_by_a_plain_trainer(
    pool: Pool, tmp_path: Path, oracle: Callable[[str], Left], mode: str, layout: Layout
) -> None:
    expected = oracle(mode)
    for left in pool.run(layout.world_size, train_in, mode, layout, tmp_path):
        assert left.callbacks == expected.callbacks
        assert left.steps == expected.steps
        assert left.links == expected.links
