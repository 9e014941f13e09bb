"""Plan: all layouts of a model on so many devices, ranked by the time of a step among those that fit into memory."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.candidates import ALL, Candidate, Choices, candidates
from lightning_hanayo.planner.estimates import Estimate, StepModel
from lightning_hanayo.planner.machine import Machine
from lightning_hanayo.planner.model_facts import ModelFacts

TOO_LARGE = "need more memory than a device has"
"""a reason in `Plan.refused`"""
USABLE = 0.9
"""of a device's memory, unless the user says how much: the rest is for the allocator, libraries and fragments"""
_MOST_SIMULATED = 5
"""times as many layouts as are shown are simulated, where closed forms are too low for some"""
_MOST_DEVICES = 64
"""times as many devices are tried for a model that doesn't fit"""
_NAMES = {
    "weights": "parameters",
    "gradients": "gradients",
    "optimizer": "the optimizer's states",
    "activations": "activations of the micro-batches under way",
    "gathered": "parameters outside the stack, which a cube holds whole during a batch",
    "suspended": "what head and loss keep",
    "messages": "messages",
    "workspace": "what one block takes while it runs",
}


class Point(NamedTuple):
    """A layout that fits, for the picture."""

    seconds: float
    num_bytes: float
    is_on_frontier: bool
    """whether no layout is both faster and smaller"""
    name: str
    """the layout in words"""


@dataclass(frozen=True)
class Plan:
    """The ranked layouts of one model."""

    facts: ModelFacts
    machine: Machine
    num_devices: int
    global_batch: int
    memory: float
    """bytes that a rank may need"""
    best: tuple[Estimate, ...]
    """simulated, the fastest first"""
    points: tuple[Point, ...]
    """of all that fit, in closed form, the fastest first"""
    num_considered: int
    refused: Counter[str]
    """how many others there were, by what excludes them"""

    @property
    def first(self) -> Estimate:
        """The fastest."""
        return self.best[0]

    def flops_share(self, estimate: Estimate) -> float:
        """The part of the devices' fastest rate that the model's own products use."""
        flops = self.facts.flops * self.global_batch
        peak = self.machine.matmul_rate(self.facts.dtype, float("inf"))
        return flops / (estimate.seconds * self.num_devices * peak)


def make_plan(
    facts: ModelFacts,
    machine: Machine,
    *,
    num_devices: int,
    global_batch: int,
    memory: float | None = None,
    top: int = 10,
    model: StepModel | None = None,
    accept: Callable[[Candidate], bool] = lambda _: True,
    batch_size: int | None = None,
    choices: Choices = ALL,
) -> Plan:
    """Rank all layouts in closed form, simulate the fastest that fit, and rank these by their simulated steps.

    Closed forms are sometimes too low, and seldom too high: as long as one is below the simulated times of the `top`
    fastest, the simulation goes on.

    Args:
        facts: the model.
        machine: the rates of devices, links and host.
        num_devices: of all nodes; a node has `machine.ranks_per_node`.
        global_batch: samples of an optimizer step.
        memory: bytes that a rank may need; None: 0.9 of the device's.
        top: how many to return, each another topology, number of waves or size of micro-batches.
        model: estimates steps; None: one without measured times.
        accept: which layouts to consider.
        batch_size: samples of a data rank's batch; None: whatever divides.
        choices: what to choose from in a cube.

    Raises:
        HanayoError: no layout divides, or none fits into memory; the message names the nearest miss.
    """
    limit = USABLE * machine.memory if memory is None else memory
    model = model or StepModel(facts, machine)
    refused: Counter[str] = Counter()
    every = candidates(facts, num_devices, global_batch, refused, batch_size, choices)
    is_forced = False not in choices.pairs
    found = [one for one in every if accept(one) and (is_forced or not one.pairs or model.saved_by_a_pair(one) > 0)]
    if not found:
        raise HanayoError(_none_divides(facts, num_devices, global_batch, refused))
    estimates = sorted(map(model.closed_form, found), key=_order)
    fitting = [one for one in estimates if one.memory.total <= limit]
    if len(fitting) < len(estimates):
        refused[TOO_LARGE] = len(estimates) - len(fitting)
    if not fitting:
        enlarged = partial(
            candidates, facts, global_batch=global_batch, refused=Counter(), batch_size=batch_size, choices=choices
        )
        raise HanayoError(
            _nearest_miss(model, estimates, num_devices, limit, lambda more: filter(accept, enlarged(num_devices=more)))
        )
    simulated: list[Estimate] = []
    for tries, one in enumerate(_distinct(fitting, by_pairs=True)):
        if len(simulated) >= top and (one.seconds > simulated[top - 1].seconds or tries == _MOST_SIMULATED * top):
            break
        again = model.simulated(one.candidate)
        if again.memory.total <= limit:
            insort(simulated, again, key=_order)
            simulated = _distinct(simulated)
    best = tuple(simulated[:top]) or (fitting[0],)
    return Plan(facts, machine, num_devices, global_batch, limit, best, _points(fitting), len(found), refused)


def _order(estimate: Estimate) -> tuple[float, float, int]:
    """Faster first; of equally fast ones the smaller, and then the one with fewer waves."""
    return round(estimate.seconds, 9), round(estimate.memory.total), estimate.candidate.num_waves


def _distinct(estimates: Sequence[Estimate], *, by_pairs: bool = False) -> list[Estimate]:
    """The first of those that differ in recomputation, sharding and how often weights are gathered alone; and in pairs,
    unless asked otherwise: only the simulation knows how many pairs a table has."""
    found: dict[tuple[object, ...], Estimate] = {}
    for one in estimates:
        own = one.candidate
        found.setdefault((own.data, own.pipe, own.mesh, own.num_waves, own.samples, by_pairs and own.pairs), one)
    return list(found.values())


def _points(estimates: Sequence[Estimate]) -> tuple[Point, ...]:
    points, least = [], float("inf")
    for one in estimates:
        points.append(Point(one.seconds, one.memory.total, one.memory.total < least, one.candidate.whole_name))
        least = min(least, one.memory.total)
    return tuple(points)


def _none_divides(facts: ModelFacts, num_devices: int, global_batch: int, refused: Counter[str]) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in refused.most_common(3))
    return (
        f"no layout of {facts.stack} ({len(facts.blocks)} blocks) on {num_devices} devices divides {global_batch} "
        f"samples per step: {reasons or 'none was accepted'}. Try another number of devices, or a --global-batch that "
        f"is a multiple of it"
    )


def _nearest_miss(
    model: StepModel,
    estimates: Sequence[Estimate],
    num_devices: int,
    limit: float,
    found_on: Callable[[int], Iterable[Candidate]],
) -> str:
    """The layout that needs the least memory: what takes most of it, and what would help."""
    least = min(estimates, key=lambda one: one.memory.total)
    parts = {name: getattr(least.memory, name) for name in _NAMES}
    largest = max(parts, key=lambda name: parts[name])
    missing = least.memory.total - limit
    more = num_devices
    way_out = f"a smaller model (tried: up to {_MOST_DEVICES * num_devices:,} devices)"
    while more < _MOST_DEVICES * num_devices:
        more *= 2
        found = map(model.closed_form, found_on(more))
        if any(one.memory.total <= limit for one in found):
            way_out = f"{more} devices of this size, or {bytes_of(least.memory.total)} on each of these"
            break
    return (
        f"no layout of {count_of(model.facts.parameters)} parameters fits into {bytes_of(limit)} on {num_devices} "
        f"devices. The nearest, {least.candidate}, needs {bytes_of(least.memory.total)}, {bytes_of(missing)} too much; "
        f"most of it, {bytes_of(parts[largest])}, for {_NAMES[largest]}. It would fit with {way_out}"
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
