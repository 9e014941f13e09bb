"""Channels: a process group for each ordered pair of pipeline ranks between which a schedule sends messages.

A pair is one channel, and its two directions are two: NCCL runs the transfers of one communicator in the order in which
they were posted, so that a receive that is posted early would hold up a send. Pairs without a rank in common are one
partition, and so one call of the factory:

    a wave over 4 ranks      0 -- 1 -- 2 -- 3       two partitions: 0-1, 2-3 and 1-2 (0 and 3 are alone in it)
    a loop over 4 ranks      ... and 3 -- 0         the same two: 3-0 fits to 1-2
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count

import torch
import torch.distributed as dist

from lightning_hanayo.monitor.hangs.waiting import Waiting
from lightning_hanayo.strategy.groups.factory import GroupFactory, Partition, covering

Pair = tuple[int, int]
"""the sender and the receiver, by pipeline rank"""


def matchings(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """The unordered pairs, in as few sets as a simple rule finds in which no rank is twice.

    Example:
        >>> matchings([(0, 1), (1, 0), (1, 2), (2, 3)])
        (((0, 1), (2, 3)), ((1, 2),))
    """
    sets: dict[int, list[Pair]] = {}
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
        free = next(i for i in count() if not {low, high} & {rank for pair in sets.get(i, ()) for rank in pair})
        sets.setdefault(free, []).append((low, high))
    return tuple(tuple(sets[i]) for i in sorted(sets))


class Channels:
    """The channels of one rank's pipeline; none where groups aren't native, since gloo tells messages apart by tags.

    Args:
        factory: makes the groups.
        pipelines: the global ranks of every pipeline of the world, in pipeline order.
        rank: this process's global rank.
    """

    def __init__(self, factory: GroupFactory, pipelines: Partition, rank: int) -> None:
        self._factory = factory
        self._pipelines = pipelines
        self._rank = rank
        self._groups: dict[Pair, dist.ProcessGroup] = {}
        self._known: set[Pair] = set()

    def connect(self, pairs: Iterable[Pair]) -> Mapping[Pair, dist.ProcessGroup]:
        """The channels of this rank, once those between `pairs` exist. Called by all ranks of the world alike.

        Both directions of a pair are made; those that an earlier run has made are used again.
        """
        wanted = {(min(pair), max(pair)) for pair in pairs} - self._known
        if self._factory.is_native and wanted:
            self._known |= wanted
            self._factory.agree_on_names()
            for channel in self._steps(wanted):
                self._make(channel)
        return self._groups

    def _steps(self, pairs: set[Pair]) -> Iterator[tuple[Pair, ...]]:
        """Channels that are made together, in the order of all ranks."""
        for matching in matchings(pairs):
            yield matching
            yield tuple((high, low) for low, high in matching)

    def _make(self, channels: tuple[Pair, ...]) -> None:
        """Make channels without a rank in common, and send something over each.

        NCCL connects two ranks when they first send, and blocks both until they do. In a batch, whose ranks come to
        their first messages in any order, that can be a circle. Here a rank has one partner at a time, and all ranks
        have the same order, so the rank that is the furthest behind has nobody to wait for.
        """
        ranks = [(ranks[sender], ranks[receiver]) for ranks in self._pipelines for sender, receiver in channels]
        world_size = sum(map(len, self._pipelines))
        partition = covering(tuple((min(pair), max(pair)) for pair in ranks), world_size)
        group = self._factory.channel(partition, "up" if channels[0][0] < channels[0][1] else "down")
        pipeline = next(ranks for ranks in self._pipelines if self._rank in ranks)
        place = pipeline.index(self._rank)
        for sender, receiver in channels:
            if place in (sender, receiver):
                self._groups[sender, receiver] = group
                self._send_once(group, is_sender=place == sender)

    def _send_once(self, group: dist.ProcessGroup, *, is_sender: bool) -> None:
        value, peer = torch.zeros(1, device=self._factory.device), 1 - group.rank()
        with Waiting("the first use of a channel", tuple(dist.get_process_group_ranks(group))):
            (group.send if is_sender else group.recv)([value], peer, 0).wait()
