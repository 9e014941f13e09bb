"""Builds the schedule of GEMS (SC'20): two copies of the model in opposite directions, one micro-batch at a time.

    P = 3    rank 0   F0 .  .  .   .   B0B0 F1 B1B1 F2
             rank 1      F0 .  .   B0B0 F1  .  .    B1B1 F2
             rank 2         F0 B0B0 F1  .   .  .    .    B1B1 F2 B2B2 ...

Even micro-batches run down the ranks, odd ones up. The next forward follows the backward in the same direction; only
its last step, on the last rank, delays the next backward. So a step takes P forwards, then P backwards per micro-batch,
and one forward between two of them. Only the reproduction needs it, so it isn't registered for `build`.
"""

from lightning_hanayo.schedule import Action, Kind, Schedule


def gems(num_ranks: int, num_microbatches: int) -> Schedule:
    """Every rank runs F and B of each micro-batch in turn."""
    down = tuple(range(num_ranks))
    twins = tuple((stage + num_ranks) % (2 * num_ranks) for stage in range(2 * num_ranks))
    rows = tuple(
        tuple(
            Action(_stage(rank, microbatch, num_ranks), kind, microbatch)
            for microbatch in range(num_microbatches)
            for kind in (Kind.F, Kind.B)
        )
        for rank in range(num_ranks)
    )
    return Schedule("gems", down + down[::-1], rows, num_microbatches, replica_of=twins)


def _stage(rank: int, microbatch: int, num_ranks: int) -> int:
    """The rank's stage in the first copy, or in the second one for odd micro-batches."""
    return rank if microbatch % 2 == 0 else 2 * num_ranks - 1 - rank
