"""Measures how long a message takes to the next rank in our runtime, after a pause, as between two actions.

rank 0   sleep | send ->                                rank 0, 2, ... send in even turns, rank 1, 3, ... in odd ones;
rank 1   sleep | wait      | received                   a hop is from the sender's call until the receiver has it
"""

from statistics import median
from time import monotonic

import torch
import torch.distributed as dist

from lightning_hanayo.pipeline_parallel.message import Message, MessageKey
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from recipes.benchmarks.harness import sleep_until
from recipes.benchmarks.ours import world_transport

WARM_UP, TURNS = 4, 24
"""turns that connect ranks and agree on shapes, and turns that count"""


def measure_hop(width: int, pause: float) -> float:
    """Return the median time of a message of `width` floats, in seconds. All ranks call it and get the same number."""
    transport = world_transport()
    channel, rank, size = PointToPointChannel(transport), transport.rank, transport.num_ranks
    message = Message(("output",), (torch.zeros(1, width),))
    starts, ends = (torch.full((WARM_UP + TURNS,), torch.nan, dtype=torch.float64) for _ in range(2))
    for turn in range(WARM_UP + TURNS):
        channel.begin_batch(0)
        sends, receives = (one % 2 == turn % 2 and 0 <= one < size - 1 for one in (rank, rank - 1))
        arriving, leaving = (MessageKey(one, "forward", 0) for one in (rank - 1, rank))
        if receives:
            channel.start_transfers([], [(arriving, rank - 1)])
        dist.barrier()
        sleep_until(monotonic() + pause)
        if sends:
            starts[turn] = monotonic()
            channel.start_transfers([(leaving, rank + 1, message)], [])
        if receives:
            channel.wait_receive(arriving)
            ends[turn] = monotonic()
    channel.finish()
    every_start, every_end = ([torch.empty_like(own) for _ in range(size)] for own in (starts, ends))
    dist.all_gather(every_start, starts)
    dist.all_gather(every_end, ends)
    hops = (torch.stack(every_end[1:]) - torch.stack(every_start[:-1]))[:, WARM_UP:]
    taken: list[float] = hops[~hops.isnan()].tolist()
    return median(taken)
