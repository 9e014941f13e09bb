"""What large runs do besides computing, counted from their plans: `python -m recipes.large.operations`.

groups         made by the package's own code, for rank 0 of a world of torch's fake process groups
messages       those of the fullest rank in the action lists of the plan's table
collectives    of the plan's volumes: blocks of the fullest rank, micro-batches, batches of a step
saves          of the plan's memory; the interval is Young's: sqrt(2 x standing still for one x time between failures)
"""

import json
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property
from math import ceil, sqrt
from typing import Any

import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]
from torch.testing._internal.distributed.fake_pg import FakeStore
from typing_extensions import override

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.candidates import Candidate
from lightning_hanayo.planner.communication_volume import Volume
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.planner.machine import machine
from lightning_hanayo.planner.model_facts import ModelFacts
from lightning_hanayo.planner.ranking import make_plan
from lightning_hanayo.schedule.communication import complete, message_pairs
from lightning_hanayo.schedule.table import Kind
from lightning_hanayo.strategy.groups import GroupFactory, GroupSettings, Partition, ProcessGroups
from lightning_hanayo.strategy.model_facts import read_model
from recipes.large.module import CausalLM
from recipes.large.plans import CASES, FOLDER, PLANS, Case, numbers_of
from recipes.paper.page import fill, markdown

PAGE = FOLDER.parents[1] / "docs" / "guides" / "at-size.md"
RUNS = "llama3-70b-64xb200", "llama3-405b-512xh100", "llama3-405b-4096xh100"

BETWEEN_FAILURES = 54 * 24 * 3600 * 16_384 / 419
"""seconds between two failures of one device: Llama 3 405B had 419 in 54 days on 16,384 (arXiv 2407.21783, table 5)"""
TO_HOST = 20e9
"""assumed bytes per second from a device to its host's memory"""
TO_FILES = 5e9
"""assumed bytes per second that a node writes to shared files, and reads"""
START = 300.0
"""assumed seconds from a failure to the first byte that is read: noticed, a node replaced, processes, groups"""


class CountedGroups(GroupFactory):
    """Makes fake groups, and counts them by backend."""

    is_native = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), timedelta(minutes=1))
        self.counts = {"gloo": 0, "nccl": 0}

    @override
    def _make(self, partition: Partition, backend: str, name: str, options: Any = None) -> dist.ProcessGroup:
        return self._counted("gloo", partition)

    @override
    def _make_tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        return self._counted("nccl", partition)

    def _counted(self, backend: str, partition: Partition) -> dist.ProcessGroup:
        self.counts[backend] += 1
        own = next(ranks for ranks in partition if dist.get_rank() in ranks)
        group: dist.ProcessGroup = dist.new_group(list(own), backend="fake", use_local_synchronization=True)
        return group


@dataclass(frozen=True)
class Operations:
    """What one planned run does."""

    case: Case
    plan: dict[str, Any]

    @cached_property
    def candidate(self) -> Candidate:
        """The plan's layout."""
        own, names = self.plan["layouts"][0], {one.name for one in fields(Candidate)}
        return Candidate(**{name: value for name, value in own.items() if name in names} | {"mesh": tuple(own["mesh"])})

    @property
    def seconds(self) -> float:
        """Of a step."""
        return float(self.plan["layouts"][0]["seconds"])

    @property
    def nodes(self) -> int:
        """Of eight devices."""
        return self.case.devices // 8

    @cached_property
    def facts(self) -> ModelFacts:
        """Of the model."""
        config = yaml.safe_load((FOLDER / f"{self.case.model}.yaml").read_text(encoding="utf-8"))
        module = CausalLM(**config["model"]["init_args"])
        batch = {"input_ids": torch.zeros(1, self.plan["tokens_per_sample"], dtype=torch.long)}
        return read_model(module, batch, 1, **numbers_of(self.case.model)._asdict())

    @cached_property
    def layout(self) -> Layout:
        """Of its pipelines."""
        own = self.candidate
        return Layout(own.schedule, own.pipe, own.num_waves, own.num_microbatches, runs_step_once=own.runs_step_once)

    def groups(self) -> dict[str, int]:
        """Process groups that a rank makes, by backend, with those of checkpoints."""
        topology = self.candidate.topology
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=topology.world_size)
        try:
            factory = CountedGroups()
            made = ProcessGroups.create(topology, 0, factory, pairs=self.candidate.pairs)
            if topology.pipe > 1:
                made.channels.connect(message_pairs(self.layout.table(self.candidate.num_microbatches)))
            factory.control(topology.groups("data", "pipe", "x", "y", "z"))
            factory.background(topology.groups("data", "pipe", "x", "y", "z"))
            return factory.counts
        finally:
            dist.destroy_process_group()

    def messages(self) -> tuple[int, float]:
        """Messages that the busiest rank receives in a step, and their bytes."""
        own = self.candidate
        if own.pipe == 1:
            return 0, 0.0
        lists = complete(self.layout.table(own.num_microbatches))
        count = own.accumulate * max(sum(one.kind in (Kind.RECV_F, Kind.RECV_B) for one in row) for row in lists)
        return count, count * self.facts.message * own.samples / own.cube_size

    def collectives(self) -> tuple[int, float]:
        """Collectives of cubes in a step, of a rank with the most blocks, and the bytes that it receives in them."""
        own, count, elements = self.candidate, 0.0, 0.0
        for block, part in self.facts.kinds:
            for product in block.products:
                volume = vars(product.of(own.samples).volume(own.mesh))
                for name, each in volume.items():
                    times = float(own.num_microbatches)
                    if own.cube_weights == "batch" and name in ("gather_w", "scatter_dw"):
                        times = 1.0
                    elif own.recompute and each and name in _FORWARD:
                        times *= 2
                    count, elements = count + part * bool(each) * times, elements + part * each * times
        blocks = own.accumulate * ceil(len(self.facts.blocks) / own.pipe)
        return round(blocks * count), blocks * elements * self.facts.element

    def sums(self) -> float:
        """Bytes that the fullest rank receives for gradients, and for parameters, of other data ranks in a step."""
        memory, data = self.plan["layouts"][0]["memory"], self.candidate.data
        passes = memory["gradients"] + (memory["weights"] if self.candidate.shard_optimizer else memory["gradients"])
        return float(passes * (1 - 1 / data))

    @property
    def saved(self) -> float:
        """Bytes of a checkpoint."""
        return self.facts.parameters * (self.facts.parameter_bytes + self.facts.optimizer_bytes)

    @cached_property
    def of_fullest(self) -> float:
        """Bytes of the parameters and the optimizer's states that the fullest rank saves."""
        memory = self.plan["layouts"][0]["memory"]
        return float(memory["weights"] + memory["optimizer"])

    @property
    def still(self) -> float:
        """Seconds for which training stands still for a save: the fullest rank's copy to its host."""
        return self.of_fullest / TO_HOST

    @property
    def write(self) -> float:
        """Seconds in which all nodes write a checkpoint, while training goes on."""
        return self.saved / self.nodes / TO_FILES

    @property
    def load(self) -> float:
        """Seconds in which a node reads its part of a checkpoint: each data rank reads the parameters."""
        return 8 * self.of_fullest / TO_FILES

    @property
    def read(self) -> float:
        """Bytes of pretrained weights in 16 bits that a node's ranks read, if each has as much as the fullest."""
        weights = self.plan["layouts"][0]["memory"]["weights"]
        return float(8 * weights * 2 / self.facts.parameter_bytes)

    @property
    def between_failures(self) -> float:
        """Seconds, of the whole run."""
        return BETWEEN_FAILURES / self.case.devices

    @property
    def save_every(self) -> float:
        """Seconds from save to save that lose the least time, and at least what a save takes."""
        return max(sqrt(2 * self.still * self.between_failures), self.write)

    @property
    def lost(self) -> float:
        """The part of the time that saves, work done again, and restarts take."""
        again = self.save_every / 2 + START + self.load
        return self.still / self.save_every + again / self.between_failures

    def without_a_node(self) -> tuple[int, str, float]:
        """The fastest of 7, 6, 5 and 4 eighths of the devices, its layout, and its step over that of before.

        The samples of a step must divide, so all devices that are left can seldom be used.
        """
        samples, plans = self.plan["global_batch"], []
        for eighths in (7, 6, 5, 4):
            devices = self.case.devices * eighths // 8
            with suppress(HanayoError):  # no layout fits
                found = make_plan(self.facts, machine(self.case.device), num_devices=devices, step=samples)
                plans.append(found)
        best = min(plans, key=lambda one: one.first.seconds)
        return best.num_devices, str(best.first.candidate), best.first.seconds / self.seconds


_FORWARD = {name for name in vars(Volume()) if Volume(**{name: 1.0}).forward}


def table(plans: dict[str, Any]) -> str:
    """A column for each run."""
    columns = [column(Operations(CASES[name], plans[name])) for name in RUNS]
    names = list(columns[0])
    heads = ("", *(f"{CASES[name].model}, {CASES[name].devices:,} {CASES[name].device.upper()}" for name in RUNS))
    return markdown(heads, [(name, *(one[name] for one in columns)) for name in names])


def column(run: Operations) -> dict[str, str]:
    """The figures of one run, by what they are."""
    groups, own = run.groups(), run.candidate
    (messages, of_messages), (collectives, of_collectives) = run.messages(), run.collectives()
    devices, layout, ratio = run.without_a_node()
    received = of_messages + of_collectives + run.sums()
    return {
        "layout": f"{own}" + (f", {own.accumulate} batches" if own.accumulate > 1 else ""),
        "step": f"{run.seconds:.3g} s",
        "groups that a rank makes: NCCL, gloo": f"{groups['nccl']}, {groups['gloo']}",
        "messages that the busiest rank receives": f"{messages:,}, {of_messages / 1e9:,.0f} GB",
        "collectives of its cube": f"{collectives:,}, {of_collectives / 1e9:,.0f} GB",
        "from other data ranks": f"{run.sums() / 1e9:,.0f} GB",
        "received per second, on average": f"{received / run.seconds / 1e9:,.0f} GB",
        "checkpoint": f"{run.saved / 1e12:,.2f} TB",
        "of the fullest rank, standing still": f"{run.of_fullest / 1e9:.1f} GB, {run.still:.1f} s",
        "written by all nodes; read": f"{run.write:,.0f} s; {run.load:,.0f} s",
        "pretrained bf16 weights that a node reads": f"{run.read / 1e9:,.0f} GB, {run.read / TO_FILES:,.0f} s",
        "time between failures": f"{run.between_failures / 3600:,.0f} h",
        "save every": f"{run.save_every / 60:,.0f} min",
        "time lost to saves and failures": f"{run.lost:.1%}".replace("%", " %"),
        "with a node less: the fastest that divides": f"{devices:,} devices: {layout}",
        "its step": f"{ratio:.2f} of before",
    }


def main() -> None:
    """Count, and write the page's table."""
    plans = json.loads(PLANS.read_text(encoding="utf-8"))
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), {"at-size": table(plans)}), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
