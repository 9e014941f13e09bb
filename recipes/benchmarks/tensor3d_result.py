"""The result: what all hosts' records say about each scheme, compared with its prediction."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from lightning_hanayo.planner.communication_volume import TransformerLayer
from recipes.benchmarks.cluster import Link
from recipes.benchmarks.harness import Summary
from recipes.benchmarks.schemes.log import Replay, elements_of, replay
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, mesh_of
from recipes.benchmarks.tensor3d_rank import Case, Collective, Record, Steps, dry_run
from recipes.cube.schemes import OneD, two_d

BYTES = 4
"""of an element"""


@dataclass(frozen=True)
class Transfer:
    """One collective: seconds, and how they compare with the bytes of the ring algorithm at the link's rate."""

    kind: str
    hosts: int
    megabytes: float
    ideal: float
    gloo: float
    ours: float


@dataclass(frozen=True)
class Result:
    """One scheme in one case. Seconds and bytes of a step, on each host."""

    name: str
    step: Summary
    forward: float
    predicted: Replay
    volume: float
    """bytes received as the formula says"""
    moved: float
    """bytes received as the program's own transfers have it"""
    on_the_wire: float
    """bytes the interfaces counted, headers included"""
    gain: float | None = None
    """the quickest 1-D's step / this one, of the same round: the median; None where 1-D wasn't run"""
    predicted_gain: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A case with all its results."""

    case: Case
    results: tuple[Result, ...]

    def of(self, name: str) -> Result:
        """One of them."""
        return next(result for result in self.results if result.name == name)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def layer_of(case: Case) -> TransformerLayer:
    """For the formulas; heads that any mesh divides."""
    return TransformerLayer(case.tokens, case.hidden, heads=case.hidden)


def volume_of(case: Case, name: str) -> float:
    """Elements a host receives in a step, by the planner's formulas."""
    layer = layer_of(case)
    if name in ONE_D:
        return case.layers * OneD(case.hosts).volume(layer)
    if name == TWO_D:
        return case.layers * two_d(round(case.hosts**0.5)).volume(layer)
    return case.layers * layer.volume(mesh_of(name)).total


def predict(case: Case, name: str, link: Link) -> tuple[Replay, float]:
    """The step's replay, and the elements that are moved. On squares the slower one of two kinds of hosts."""
    programs = [dry_run(case, name, rank) for rank in ((0, 1) if name == TWO_D else (0,))]
    replays = [replay(events, link.bytes_per_second / BYTES) for events in programs]
    return max(replays, key=lambda one: one.step), elements_of(programs[0])


def outcome_of(case: Case, link: Link, hosts: Sequence[dict[str, Steps]]) -> Outcome:
    """Put the hosts' records together."""
    found = [_result(case, link, name, [steps[name] for steps in hosts]) for name in case.schemes]
    rounds = {name: _rounds([steps[name].end for steps in hosts]) for name in case.schemes}
    peers = [name for name in case.schemes if name in ONE_D]
    if not peers:
        return Outcome(case, tuple(found))
    best = [min(ends) for ends in zip(*(rounds[name] for name in peers), strict=True)]
    ideal = min(result.predicted.step for result in found if result.name in peers)
    return Outcome(case, tuple(_beside(result, rounds[result.name], best, ideal) for result in found))


def _beside(result: Result, steps: Sequence[float], best: Sequence[float], ideal: float) -> Result:
    gain = median(peer / own for peer, own in zip(best, steps, strict=True))
    return Result(**(vars(result) | {"gain": gain, "predicted_gain": ideal / result.predicted.step}))


def _rounds(by_host: Sequence[Sequence[float]]) -> list[float]:
    """Each round's, of the last host."""
    return [max(ends) for ends in zip(*by_host, strict=True)]


def _result(case: Case, link: Link, name: str, hosts: Sequence[Steps]) -> Result:
    predicted, elements = predict(case, name, link)
    return Result(
        name=name,
        step=Summary.of(_rounds([steps.end for steps in hosts])),
        forward=median(_rounds([steps.forward for steps in hosts])),
        predicted=predicted,
        volume=BYTES * volume_of(case, name),
        moved=BYTES * elements,
        on_the_wire=fmean(median(steps.received) for steps in hosts),
    )


def transfers_of(link: Link, records: Sequence[Record]) -> list[Transfer]:
    """Collectives, as the last host saw them."""
    return [_transfer(link, same) for same in zip(*(record.collectives for record in records), strict=True)]


def _transfer(link: Link, same: Sequence[Collective]) -> Transfer:
    first = same[0]
    twice = 2 if first.kind == "all-reduce" else 1
    ideal = twice * first.megabytes * 2**20 * (first.hosts - 1) / first.hosts / link.bytes_per_second
    gloo, ours = (median(_rounds([getattr(one, whose) for one in same])) for whose in ("gloo", "ours"))
    return Transfer(first.kind, first.hosts, first.megabytes, ideal, gloo, ours)
