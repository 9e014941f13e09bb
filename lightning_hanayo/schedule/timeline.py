"""Timeline: which rank did what from when to when, simulated or measured."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.table import Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one pipeline rank, from `start` to `end` in the timeline's unit of time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans and what follows from them. Times are in whatever unit the spans have (T_F, seconds).

    Example:
        >>> timeline = simulate(build("gpipe", num_ranks=4, num_microbatches=4), CostModel())
        >>> timeline.makespan, round(timeline.bubble_ratio, 3), timeline.peak_activations[0]
        (21.0, 0.429, 4.0)
    """

    spans: tuple[Span, ...]
    shares: tuple[float, ...] = ()
    """the part of M_a that one micro-batch's activations of each stage take; empty: equal parts of each rank"""

    @classmethod
    def of(cls, schedule: Schedule, spans: Iterable[Span]) -> "Timeline":
        """The timeline of spans that were run (or simulated) for `schedule`."""
        return cls(tuple(spans), tuple(schedule.share_of(stage) for stage in range(schedule.num_stages)))

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks that appear."""
        return max((span.rank for span in self.spans), default=-1) + 1

    @property
    def begin(self) -> float:
        """The first start."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - self.begin

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computed."""
        total = [0.0] * self.num_ranks
        for span in self.spans:
            if span.action.kind.is_compute:
                total[span.rank] += span.end - span.start
        return tuple(total)

    @property
    def bubble_ratio(self) -> float:
        """The part of all ranks' time in which they don't compute: 1 - busy / (P makespan)."""
        whole = self.num_ranks * self.makespan
        return 1 - sum(self.busy) / whole if whole else 0.0

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most activations each rank held at once, in M_a: one micro-batch's activations of one rank's whole share.

        An activation lives from the start of its `F` to the end of its `B` or `W`; an `I` doesn't free it.
        """
        shares = self.shares or self._equal_shares()
        changes: dict[int, list[tuple[float, int, float]]] = defaultdict(list)
        for span in self.spans:
            if span.action.kind is Kind.F:
                changes[span.rank].append((span.start, 1, shares[span.action.stage]))
            elif span.action.kind in (Kind.B, Kind.W):
                changes[span.rank].append((span.end, 0, -shares[span.action.stage]))
        return tuple(_peak(sorted(changes[rank])) for rank in range(self.num_ranks))

    def _equal_shares(self) -> tuple[float, ...]:
        rank_of = {span.action.stage: span.rank for span in self.spans}
        ranks = list(rank_of.values())
        return tuple(
            1 / ranks.count(rank_of[stage]) if stage in rank_of else 0.0
            for stage in range(max(rank_of, default=-1) + 1)
        )

    def to_json(self) -> str:
        """The timeline as JSON text, with the figures that follow from it for readers without this package."""
        return json.dumps(
            {
                "makespan": self.makespan,
                "bubble_ratio": self.bubble_ratio,
                "peak_activations": self.peak_activations,
                "shares": self.shares,
                "spans": [
                    {"rank": span.rank, "action": str(span.action), "start": span.start, "end": span.end}
                    for span in self.spans
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """The timeline that `to_json` wrote.

        Raises:
            HanayoError: the text is no such JSON.
        """
        try:
            data = json.loads(text)
            spans = tuple(
                Span(int(one["rank"]), Action.parse(one["action"]), float(one["start"]), float(one["end"]))
                for one in data["spans"]
            )
            return cls(spans, tuple(map(float, data.get("shares", ()))))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise HanayoError(
                f'this is no timeline: {error!r}; expected {{"spans": [{{"rank": 0, "action": "0F0", "start": 0.0, '
                '"end": 1.0}, ...]}}'
            ) from None


def _peak(changes: list[tuple[float, int, float]]) -> float:
    held = peak = 0.0
    for _, _, share in changes:
        held += share
        peak = max(peak, held)
    return round(peak, 9)
