"""What torch is asked for on GPUs: one split per partition, NCCL's options by purpose, and gloo for control groups.

Torch for CPUs has neither NCCL nor its options, so both are recorded here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hanayo.strategy import groups
from lightning_hanayo.strategy.groups import (
    CHANNEL,
    CUBE,
    DATA,
    NativeGroups,
    ProcessGroups,
    backend_for,
    forget_groups,
    group_factory,
    nccl_options,
)
from lightning_hanayo.topology import Topology
from tests.harness.fake_groups import fake_world

MINUTE = timedelta(minutes=1)


@dataclass
class Config:
    max_ctas: int | None = None


@dataclass
class NcclOptions:
    is_high_priority_stream: bool = False
    config: Config = field(default_factory=Config)


class FakeNccl:
    Options = NcclOptions


@dataclass
class Calls:
    """What a rank asks torch for; fake groups are made."""

    made: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    splits: list[tuple[Any, list[list[int]], dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """This process is rank 5 of 8, with a device whose backend is called nccl."""
    calls, new_group = Calls(), dist.new_group

    def make(ranks: list[int] | None = None, *, backend: str, **options: Any) -> Any:
        calls.made.append((backend, options | {"ranks": ranks}))
        return new_group(
            ranks, backend="fake", use_local_synchronization=options.get("use_local_synchronization", False)
        )

    def split(parent: Any, ranks: list[list[int]], **options: Any) -> Any:
        calls.splits.append((parent, ranks, options))
        own = next(group for group in ranks if 5 in group)
        return new_group(own, backend="fake", use_local_synchronization=True)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "cpu", "nccl")
    monkeypatch.setattr(dist, "new_group", make)
    monkeypatch.setattr(dist, "split_group", split)
    with fake_world(5, 8):
        yield calls


@pytest.fixture
def factory(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> NativeGroups:
    """One that can split."""
    monkeypatch.setattr(groups, "_can_split", lambda device: True)
    return NativeGroups(torch.device("cpu"), MINUTE)


@pytest.mark.parametrize(
    ("settings", "is_high_priority", "max_ctas"), [(CHANNEL, True, 4), (CUBE, True, None), (DATA, False, None)]
)
def test_options_of_nccl(calls: Calls, settings: Any, is_high_priority: bool, max_ctas: int | None) -> None:
    options = nccl_options(settings, MINUTE)
    assert options._timeout == MINUTE
    assert (options.is_high_priority_stream, options.config.max_ctas) == (is_high_priority, max_ctas)


def test_a_partition_is_one_split_of_a_world_over_nccl_alone(factory: NativeGroups, calls: Calls) -> None:
    world = calls.made[0]
    assert (world[0], world[1]["ranks"], world[1]["group_desc"]) == ("nccl", None, "hanayo native world")
    group = factory.tensors(((0, 1), (2, 3), (4, 5), (6, 7)), CUBE)
    (parent, ranks, options), *others = calls.splits
    assert parent is factory._parent and not others and group.size() == 2
    assert ranks == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (options["timeout"], options["group_desc"]) == (MINUTE, "hanayo cube")
    assert options["pg_options"].is_high_priority_stream
    assert len(calls.made) == 1


def test_control_groups_are_made_by_their_members_over_gloo(factory: NativeGroups, calls: Calls) -> None:
    factory.control(((0, 1), (2, 3), (4, 5), (6, 7)))
    assert [(backend, made["ranks"], made["use_local_synchronization"]) for backend, made in calls.made[1:]] == [
        ("gloo", [4, 5], True)
    ]
    assert not calls.splits


def test_a_whole_run_on_gpus(factory: NativeGroups, calls: Calls) -> None:
    """Data 2, pipeline 2, cube 1x2x1: axes y, xy, yz and xyz are the same ranks, and so one group."""
    groups = ProcessGroups.create(Topology(data=2, pipe=2, cube=(1, 2, 1)), 5, factory)
    groups.channels.connect([(0, 1), (1, 0)])
    descriptions = [options["group_desc"] for _, _, options in calls.splits]
    assert descriptions == ["hanayo cube", *["hanayo data"] * 2, "hanayo replica", *["hanayo channel"] * 2]
    assert [backend for backend, _ in calls.made] == ["nccl", *["gloo"] * 4]  # pipe, data, replica, cube


def test_where_nccl_cant_split_groups_are_made_by_their_members(calls: Calls) -> None:
    factory = NativeGroups(torch.device("cpu"), MINUTE)  # the world isn't bound to a device
    factory.tensors(((0, 1), (2, 3), (4, 5), (6, 7)), DATA)
    assert not calls.splits
    ((backend, made),) = calls.made
    assert (backend, made["ranks"], made["use_local_synchronization"]) == ("nccl", [4, 5], True)
    assert not made["pg_options"].is_high_priority_stream


def test_an_abort_reaches_the_world_and_all_native_groups(factory: NativeGroups) -> None:
    factory.tensors(((0, 1), (2, 3), (4, 5), (6, 7)), DATA)
    factory.control(((0, 1), (2, 3), (4, 5), (6, 7)))
    assert len(factory._native_groups()) == 3
    factory.abort()


def test_trainers_of_one_process_share_groups_on_the_gpu(calls: Calls) -> None:
    """Those over gloo are each Trainer's own: a failed rank wakes others by closing them."""
    device, partition = torch.device("cuda", 0), ((0, 1), (2, 3), (4, 5), (6, 7))
    before = group_factory(device, MINUTE)
    control = before.control(partition)
    after = group_factory(device, MINUTE)
    assert after is before and after.is_open
    assert after.control(partition) is not control
    forget_groups()
    assert group_factory(device, MINUTE) is not before
    forget_groups()


def test_another_world_gets_other_groups(calls: Calls) -> None:
    before = group_factory(torch.device("cuda", 0), MINUTE)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    assert not before.is_open
    assert group_factory(torch.device("cuda", 0), MINUTE) is not before
    forget_groups()


def test_cpus_need_no_nccl() -> None:
    assert backend_for(torch.device("cpu")) == "gloo"
    assert backend_for(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    with fake_world(0, 1):
        assert not isinstance(group_factory(torch.device("cpu"), MINUTE), NativeGroups)
