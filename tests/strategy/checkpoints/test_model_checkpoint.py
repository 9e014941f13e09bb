"""Each mode of `ModelCheckpoint` leaves the checkpoints, under the names, that it leaves after a plain Trainer's run.

plain Trainer                     P = 2                    D = 2, or a cube
epoch=0-step=2.ckpt   file        the same name, a folder  the same name, a folder
last.ckpt             file        the same name, a folder  ...
weights alone         file        file                     file
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout
from tests.strategy.checkpoints.saving_runs import MODES, Left, train_in

ALONE, PIPE, DATA, CUBE = Layout(), Layout(2), Layout(1, data=2), Layout(1, cube=(1, 2, 1))
COVER = [("a link to the last of the best", PIPE)]


@pytest.fixture(scope="module")
def oracle(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[Any], Left]]:
    """What the callbacks of a plain Trainer say in a mode, and what they leave."""

    @cache
    def left_in(mode: str) -> tuple[list[Any], Left]:
        folder = tmp_path_factory.mktemp("alone")
        (said,) = pool.run(1, train_in, mode, ALONE, folder)
        return said, Left.in_folder(folder)

    return left_in


@pytest.mark.parametrize(("mode", "layout"), covered(product(MODES, (PIPE, DATA, CUBE)), by=COVER), ids=str)
def test_the_same_checkpoints_are_left_as_by_a_plain_trainer(
    pool: Pool, tmp_path: Path, oracle: Callable[[str], tuple[list[Any], Left]], mode: str, layout: Layout
) -> None:
    said, expected = oracle(mode)
    assert pool.run(layout.world_size, train_in, mode, layout, tmp_path) == [said] * layout.world_size
    left = Left.in_folder(tmp_path)
    assert (left.steps, left.links) == (expected.steps, expected.links)
    folders = set() if mode == "weights only" else left.steps.keys() - left.links.keys()
    assert not expected.folders and left.folders == folders
