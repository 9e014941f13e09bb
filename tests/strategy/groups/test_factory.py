"""Groups are made once per partition, and few: also in a world of 1,024 ranks."""

import random
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_hanayo.schedule import build
from lightning_hanayo.schedule.communication import message_pairs
from lightning_hanayo.strategy.groups import DATA, GroupFactory, Partition, ProcessGroups, covering
from lightning_hanayo.topology import Topology
from tests.harness import models
from tests.harness.fake_groups import FakeGroups, fake_world
from tests.harness.pool import Pool
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer

LARGE = Topology(data=8, pipe=16, cube=(2, 2, 2))


def made_in(topology: Topology, rank: int, *, schedule: str) -> tuple[ProcessGroups, FakeGroups]:
    factory = FakeGroups()
    groups = ProcessGroups.create(topology, rank, factory)
    table = build(schedule, num_ranks=topology.pipe, num_microbatches=2 * topology.pipe)
    groups.channels.connect(message_pairs(table))
    return groups, factory


@pytest.mark.parametrize(("schedule", "num_channels"), [("hanayo", 4), ("interleaved", 4)])
def test_1024_ranks_make_few_groups(schedule: str, num_channels: int) -> None:
    rank = random.Random(schedule).randrange(LARGE.world_size)
    with fake_world(rank, LARGE.world_size):
        _, factory = made_in(LARGE, rank, schedule=schedule)
    counts = Counter(name for name, _ in factory.made)
    assert counts == {"control": 5, "cube": 7, "data": 5, "replica": 1, "channel": num_channels}
    assert all(sorted(sum(partition, ())) == list(range(1024)) for _, partition in factory.made)


def test_all_ranks_make_the_same_groups_in_the_same_order() -> None:
    topology, made = Topology(data=2, pipe=3, cube=(1, 2, 1)), []
    for rank in range(topology.world_size):
        with fake_world(rank, topology.world_size):
            made.append(made_in(topology, rank, schedule="interleaved")[1].made)
    assert all(other == made[0] for other in made)


def test_equal_groups_are_one() -> None:
    with fake_world(0, 4):
        groups, _ = made_in(Topology(data=2, pipe=2), 0, schedule="hanayo")
        assert groups.replica is groups.control
        assert groups.metrics is groups.data
        assert groups.data is not groups.data_control


def test_a_partition_covers_the_world() -> None:
    assert covering(((1, 2),), 4) == ((1, 2), (0,), (3,))


def two_partitions(extra: bool) -> tuple[list[int], float, bool]:
    """Groups of pairs, after a user has made one that not all ranks are in."""
    dist.init_process_group("gloo")
    if extra:
        dist.new_group([0, 1])
    factory = GroupFactory(torch.device("cpu"), timedelta(seconds=60))
    rows: Partition = ((0, 1), (2, 3))
    across: Partition = ((0, 2), (1, 3))
    row, column = factory.control(rows), factory.tensors(across, DATA)
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=column)
    made_once = factory.control(rows) is row and factory.tensors(rows, DATA) is not row
    dist.barrier()  # a rank that ended now would close connections that others are still making
    return dist.get_process_group_ranks(row), float(total), made_once


@pytest.mark.parametrize("extra", [False, True])
def test_gloo_groups_hold_the_ranks_of_their_partition(pool: Pool, extra: bool) -> None:
    results = pool.run(4, two_partitions, extra)
    assert results == [([0, 1], 2.0, True), ([0, 1], 4.0, True), ([2, 3], 2.0, True), ([2, 3], 4.0, True)]


def rendezvous_of_members() -> int:
    dist.init_process_group("gloo")
    made: list[list[int]] = []
    original = dist.new_group
    dist.new_group = lambda ranks, **options: made.append(ranks) or original(ranks, **options)
    try:
        GroupFactory(torch.device("cpu"), timedelta(seconds=60)).control(((0,), (1,), (2,)))
    finally:
        dist.new_group = original
    return len(made)


def test_a_rank_takes_part_in_its_own_group_only(pool: Pool) -> None:
    assert pool.run(3, rendezvous_of_members) == [1, 1, 1]


def trainers_around_groups_of_a_user() -> None:
    """A user makes a group of some ranks between two runs on different layouts."""
    for layout in (Layout(2, 1, 1), Layout(1, 1, 2)):
        trainer = make_trainer(layout, strategy=make_strategy(layout), max_steps=1)
        trainer.fit(models.build(models.MLP), make_loader(models.vectors((8,))))
        dist.new_group([0])


def test_groups_of_users_dont_disturb_those_of_later_runs(pool: Pool) -> None:
    pool.run(2, trainers_around_groups_of_a_user)
