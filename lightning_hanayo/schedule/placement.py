"""Placement: which pipeline rank holds each stage.

    zigzag, P = 4, W = 1                     loop, P = 4, 2 stages per rank

    rank 0   0                   7           rank 0   0        4
    rank 1     1               6             rank 1     1        5
    rank 2       2           5               rank 2       2        6
    rank 3         3       4                 rank 3         3        7

A zig-zag turns at the ends, so stages 3 and 4 are on one rank, and it begins and ends on rank 0. A loop starts again.
"""


def zigzag(num_ranks: int, num_waves: int) -> tuple[int, ...]:
    """The rank of each of the 2WP stages of W waves (Hanayo, section 3).

    Example:
        >>> zigzag(3, 1)
        (0, 1, 2, 2, 1, 0)
    """
    down = tuple(range(num_ranks))
    return (down + down[::-1]) * num_waves


def loop(num_ranks: int, num_stages_per_rank: int = 1) -> tuple[int, ...]:
    """The rank of each of the VP stages in round-robin order.

    Example:
        >>> loop(3, 2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * num_stages_per_rank
