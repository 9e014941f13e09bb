"""Runs whose messages go over channels train as one process does: on CPUs the channels are over gloo.

hanayo, P = 4, W = 1                      the same table with ranks 1 and 2 exchanged, in a CSV file

rank 0   0                   7            rank 0   0                   7        messages 0-2, 2-1 and 1-3:
rank 1     1               6              rank 1       2           5            hops between ranks that are
rank 2       2           5                rank 2     1               6          no neighbours
rank 3         3       4                  rank 3         3       4
"""

from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from lightning_hanayo.overlap.link_queue import Work
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport
from lightning_hanayo.schedule import build
from tests.harness import models
from tests.harness.fake_groups import channels_over_gloo
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.training import Layout, Outcome, Training, assert_bit_equal, assert_same_training, fit, merge

MLP = Training(models.MLP, partial(models.vectors, (8, 8, 8)), steps=3)


def fit_over_channels(training: Training, layout: Layout) -> tuple[Outcome, set[tuple[int, int]]]:
    """The outcome, and the channels over which this rank has sent or received messages."""
    used: set[tuple[int, int]] = set()
    original = ProcessGroupTransport._post

    def note(self: ProcessGroupTransport, peer: int, tag: int, buffer: Tensor, *, sends: bool, on_host: bool) -> Work:
        if self.channels:
            used.add((self.rank, peer) if sends else (peer, self.rank))
        return original(self, peer, tag, buffer, sends=sends, on_host=on_host)

    with pytest.MonkeyPatch.context() as patch, channels_over_gloo():
        patch.setattr(ProcessGroupTransport, "_post", note)
        return fit(training, layout), used


def run_over_channels(pool: Pool, layout: Layout) -> tuple[Outcome, set[tuple[int, int]]]:
    ranks = pool.run(layout.world_size, fit_over_channels, MLP, layout)
    return merge([outcome for outcome, _ in ranks], layout), {pair for _, used in ranks for pair in used}


def test_a_csv_table_may_send_between_any_ranks(pool: Pool, tmp_path: Path) -> None:
    table = build("hanayo", num_ranks=4, num_microbatches=4)
    table.to_csv(tmp_path / "table.csv")
    rows = (tmp_path / "table.csv").read_text().splitlines(keepends=True)
    (tmp_path / "hops.csv").write_text("".join([rows[0], rows[2], rows[1], rows[3]]))
    outcome, used = run_over_channels(pool, Layout(4, 1, 1, schedule=str(tmp_path / "hops.csv")))
    assert used == {(0, 2), (2, 0), (2, 1), (1, 2), (1, 3), (3, 1)}
    assert_bit_equal(outcome.weights, by_hand(pool, MLP).weights)


@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout(2, 1, 1, cube=(1, 2, 1))], ids=str)
@pytest.mark.thorough  # the groups of these layouts, in one process: tests/strategy/groups
def test_data_ranks_and_cubes(pool: Pool, layout: Layout) -> None:
    outcome, used = run_over_channels(pool, layout)
    assert used == {(0, 1), (1, 0)}
    assert_same_training(outcome, plain(pool, MLP))
