"""The rank of each stage.

zigzag, P = 3, W = 2             loop, P = 3, V = 2

0   0         5 6         11     0   0     3
1     1     4     7    10        1     1     4
2       2 3         8 9          2       2     5
"""

import pytest

from lightning_hanayo.schedule.table import loop, zigzag


def test_the_zigzag_of_the_drawing() -> None:
    assert zigzag(3, 2) == (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("num_waves", range(1, 5))
def test_the_zigzag_is_the_papers_rule(num_ranks: int, num_waves: int) -> None:
    ranks = zigzag(num_ranks, num_waves)
    for stage, rank in enumerate(ranks):
        leg, place = divmod(stage, num_ranks)
        assert rank == (place if leg % 2 == 0 else num_ranks - 1 - place)
    assert len(ranks) == 2 * num_waves * num_ranks
    assert ranks[0] == ranks[-1] == 0


def test_the_loop_of_the_drawing() -> None:
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
