"""Plan: all layouts of a model on so many devices, ranked by the time of a step among those that fit into memory.

The file of a plan: a configuration that `hanayo fit` applies on top of the recipe, and that a strategy reads.

# hanayo plan: 2.64 s per step of 512 samples, 43.9 GB per device
trainer:
  devices: 8
  num_nodes: 8
  accumulate_grad_batches: 1
  strategy:
    class_path: lightning_hanayo.HanayoStrategy
    init_args: {pipeline_parallel_size: 2, num_waves: 2, ...}
data:
  init_args:
    batch_size: 128
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_hanayo.errors import HanayoError, counted, writing
from lightning_hanayo.planner.candidates import ALL, ONE_RANK, BatchesOfStep, Candidate, Choices, candidates
from lightning_hanayo.planner.estimates import Estimate, RankMemory, StepModel
from lightning_hanayo.planner.files import read_text, refusing
from lightning_hanayo.planner.machine import Machine
from lightning_hanayo.planner.model_facts import ModelFacts

TOO_LARGE = "need more memory than a device has"
"""a reason in `Plan.refused`"""
USABLE = 0.9
"""of a device's memory, unless the user says how much: the rest is for the allocator, libraries and fragments"""
_TRIES = 4
"""layouts of one pipeline size and cube that are simulated"""
_MOST_DOUBLED = 6
"""times that the number of devices is doubled for a model that doesn't fit"""


@dataclass(frozen=True)
class Plan:
    """The ranked layouts of one model."""

    facts: ModelFacts
    machine: Machine
    num_devices: int
    global_batch: int
    """samples of the fastest one's step"""
    memory: float
    """bytes that a rank may need"""
    best: tuple[Estimate, ...]
    """simulated, the fastest first"""
    fitting: tuple[Estimate, ...]
    """all that fit, in closed form, the fastest first"""
    num_considered: int
    refused: Counter[str]
    """how many others there were, by what excludes them"""

    @property
    def first(self) -> Estimate:
        """The fastest."""
        return self.best[0]

    def mfu(self, estimate: Estimate) -> float:
        """Model FLOPs utilization: the part of the devices' peak that the model's own products use.

        The peak is that of the data sheet, in 16 bits; else the fastest rate that was measured.
        """
        peak = self.machine.peak or self.machine.matmul_rate(self.facts.dtype, float("inf"))
        return self.facts.flops * estimate.candidate.samples_per_step / (estimate.seconds * self.num_devices * peak)


def make_plan(
    facts: ModelFacts,
    machine: Machine,
    *,
    num_devices: int,
    step: int | BatchesOfStep,
    memory: float | None = None,
    top: int = 5,
    model: StepModel | None = None,
    accept: Callable[[Candidate], bool] = lambda _: True,
    choices: Choices = ALL,
) -> Plan:
    """Rank all layouts in closed form, simulate the fastest that fit, and rank these by their simulated steps.

    Layouts are compared by the time of equally many samples.

    Args:
        facts: the model.
        machine: the rates of devices, links and host.
        num_devices: of all nodes; a node has `machine.ranks_per_node`.
        step: the samples of an optimizer step, of all data ranks; or the batches of each data rank.
        memory: bytes that a rank may need; None: 0.9 of the device's.
        top: how many to return, each of another pipeline size or cube: the fastest of those that are simulated.
        model: estimates steps; None: one without measured times.
        accept: which layouts to consider.
        choices: what to choose from in a cube.

    Raises:
        HanayoError: no layout divides, or none fits into memory; the message names the nearest miss.
    """
    samples = step if isinstance(step, int) else prod(step)

    def order(one: Estimate) -> tuple[float, float, int]:
        """Faster first; of equally fast ones the smaller, and then the one with fewer waves."""
        seconds = one.seconds * samples / one.candidate.samples_per_step
        return round(seconds, 9), round(one.memory.total), one.candidate.num_waves

    limit = USABLE * machine.memory if memory is None else memory
    model = model or StepModel(facts, machine)

    def considered(num_devices: int, refused: Counter[str]) -> list[Candidate]:
        return [*filter(accept, candidates(facts, num_devices, step, refused, choices))]

    def fitting_of(found: Sequence[Candidate]) -> list[Candidate]:
        return [one for one in found if model.memory(one).total <= limit]

    refused: Counter[str] = Counter()
    found = considered(num_devices, refused)
    if not found:
        raise HanayoError(_none_divides(facts, num_devices, samples, refused))
    fitting = sorted(map(model.closed_form, fitting_of(found)), key=order)
    if len(fitting) < len(found):
        refused[TOO_LARGE] = len(found) - len(fitting)
    if not fitting:
        least = min(found, key=lambda one: model.memory(one).total)
        counts = (2**power * num_devices for power in range(1, _MOST_DOUBLED + 1))
        enough = next((more for more in counts if fitting_of(considered(more, Counter()))), None)
        raise HanayoError(_nearest_miss(facts, least, model.memory(least), num_devices, limit, enough))
    # of each pipeline size and cube: those that differ in more than recomputation, sharding, pairs, and cube_weights
    alike: dict[tuple[object, ...], dict[tuple[object, ...], Candidate]] = defaultdict(dict)
    for own in (one.candidate for one in fitting):
        alike[own.pipe, own.mesh].setdefault((own.num_waves, own.samples), own)
    best: list[Estimate] = []
    for group in alike.values():
        simulated = [model.simulated(one) for one in islice(group.values(), _TRIES)]
        best += sorted((one for one in simulated if one.memory.total <= limit), key=order)[:1]
        if len(best) == top:
            break
    best = sorted(best, key=order) or fitting[:1]
    of_step = best[0].candidate.samples_per_step
    return Plan(facts, machine, num_devices, of_step, limit, tuple(best), tuple(fitting), len(found), refused)


def _none_divides(facts: ModelFacts, num_devices: int, global_batch: int, refused: Counter[str]) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in refused.most_common(3))
    return (
        f"no layout of {facts.stack} ({counted(len(facts.blocks), 'block')}) on {counted(num_devices, 'device')} "
        f"divides {counted(global_batch, 'sample')} per step: {reasons or 'none was accepted'}. Try another number of "
        f"devices, or a --global-batch that is a multiple of it"
    )


def _nearest_miss(
    facts: ModelFacts, least: Candidate, memory: RankMemory, num_devices: int, limit: float, enough: int | None
) -> str:
    """The layout that needs the least memory: what takes most of it, and what would help.

    Args:
        facts: the model.
        least: that layout.
        memory: which it needs.
        num_devices: there are.
        limit: bytes of a device.
        enough: devices on which another layout would fit; None: no number that was tried.
    """
    largest, most = max(vars(memory).items(), key=lambda part: part[1])
    way_out = f"a smaller model (tried: up to {2**_MOST_DOUBLED * num_devices:,} devices)"
    if enough is not None:
        way_out = f"{enough} devices of this size, or {bytes_of(memory.total)} on each of these"
    return (
        f"no layout of {count_of(facts.parameters)} parameters fits into {bytes_of(limit)} on "
        f"{counted(num_devices, 'device')}. "
        f"The nearest, {least}, needs {bytes_of(memory.total)}, {bytes_of(memory.total - limit)} too much; most of it, "
        f"{bytes_of(most)}, for {largest} (docs/guides/memory.md). It would fit with {way_out}"
    )


def bytes_of(number: float) -> str:
    """For people.

    Example:
        >>> bytes_of(7.21e10), bytes_of(3e5)
        ('72.1 GB', '300.0 KB')
    """
    unit = next((unit for unit in ("GB", "MB") if number >= _UNITS[unit] / 2), "KB")
    return f"{number / _UNITS[unit]:.1f} {unit}"


def count_of(number: float) -> str:
    """For people.

    Example:
        >>> count_of(6.74e9), count_of(1.86e6)
        ('6.74 billion', '1.86 million')
    """
    return f"{number / 1e9:.3g} billion" if number >= 1e8 else f"{number / 1e6:.3g} million"


_UNITS = {"GB": 1e9, "MB": 1e6, "KB": 1e3}


STRATEGY = "lightning_hanayo.HanayoStrategy"
MAX_BYTES = 1 << 20
"""of a file"""
_SIZES = ("pipeline_parallel_size", "data_parallel_size", "num_microbatches")
"""that each plan has"""
OF_BOTH = ("shard_optimizer", "cube_weights", "pairs", "experts", "cube_outside")
"""options of `HanayoStrategy` that are attributes of a `Candidate`, with the same values"""


def strategy_options(candidate: Candidate) -> dict[str, Any]:
    """The arguments of `HanayoStrategy` for a layout."""
    return {
        "pipeline_parallel_size": candidate.pipe,
        "num_waves": candidate.num_waves if candidate.pipe > 1 else "auto",
        "data_parallel_size": candidate.data,
        "cube": list(candidate.mesh) if candidate.cube_size > 1 else 1,
        "num_microbatches": candidate.num_microbatches,
        "schedule": "auto" if candidate.schedule == ONE_RANK else candidate.schedule,
        "recompute": "blocks" if candidate.recompute else "none",
        **{name: getattr(candidate, name) for name in OF_BOTH},
        "step": "batch" if candidate.runs_step_once else "auto",
    }


def overlay(plan: Plan, *, num_nodes: int, accelerator: str | None, sets_batch_size: bool) -> dict[str, Any]:
    """What the file holds.

    Args:
        plan: its fastest layout is taken.
        num_nodes: of the run.
        accelerator: the Trainer's; None: the recipe's.
        sets_batch_size: whether the recipe's data has an argument `batch_size`.
    """
    candidate = plan.first.candidate
    trainer: dict[str, Any] = {
        "devices": plan.num_devices // num_nodes,
        "num_nodes": num_nodes,
        "accumulate_grad_batches": candidate.accumulate,
        "strategy": {"class_path": STRATEGY, "init_args": strategy_options(candidate)},
    }
    if accelerator is not None:
        trainer["accelerator"] = accelerator
    made: dict[str, Any] = {"trainer": trainer}
    if sets_batch_size:
        made["data"] = {"init_args": {"batch_size": candidate.batch_size}}
    return made


def save_plan(path: str | Path, plan: Plan, content: Mapping[str, Any]) -> None:
    """Write the file.

    Raises:
        HanayoError: it can't be written.
    """
    first, own = plan.first, plan.first.candidate
    devices = f"{counted(plan.num_devices, 'device')} ({plan.machine.name}), {bytes_of(first.memory.total)} per device"
    about = f"# hanayo plan: {first.seconds:.3g} s per step of {counted(plan.global_batch, 'sample')} on {devices}\n"
    about += f"# {own}\n# DataLoader's batch_size: {own.batch_size}, for each of {counted(own.data, 'data rank')}\n"
    with writing(path):
        Path(path).write_text(about + yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


def load_plan(path: str | PathLike[str]) -> dict[str, Any]:
    """The arguments of `HanayoStrategy` in a file that `hanayo plan` wrote.

    Raises:
        HanayoError: there is no such file, or it holds something else.
    """
    with refusing(f"layout={fspath(path)!r}", "plan", "the plan.yaml that hanayo plan writes"):
        try:
            data = yaml.safe_load(read_text(path, MAX_BYTES))
        except yaml.YAMLError as error:
            raise HanayoError(f"it is no YAML: {str(error).splitlines()[0]}") from None
        options = data["trainer"]["strategy"]["init_args"]
        if not isinstance(options, dict) or not set(_SIZES) <= set(options):
            raise HanayoError(f"trainer.strategy.init_args has no {', '.join(_SIZES)}")
        return dict(options)
