"""MemoryModel: computes from the bytes of each stage how many bytes each rank holds over time."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.number_checks import check_numbers
from lightning_hanayo.schedule.simulate import Curve, Span, Timeline
from lightning_hanayo.schedule.table import COMPUTE, Action, Kind

Bytes = float | tuple[float, ...]

_Change = tuple[float, str, float]
"""a time, what changes then, and by how much"""
_STANDING = ("weights", "gradients", "optimizer", "gathered", "send_buffers")
"""held all the time"""
_WORKSPACE = {
    Kind.F: "forward_workspace",
    Kind.B: "backward_workspace",
    Kind.I: "backward_workspace",
    Kind.W: "weight_workspace",
}
_EACH = ("message", "send_buffers", "forward_workspace", "backward_workspace", "weight_workspace")
"""of which a number counts for each stage: it isn't a rank's share of the model"""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The bytes that one rank holds when it holds the most, by purpose; see `MemoryModel`."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    suspended: float = 0.0
    queue: float = 0.0
    messages: float = 0.0
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        standing = self.weights + self.gradients + self.optimizer
        return float(
            standing + self.activations + self.gathered + self.suspended + self.queue + self.messages + self.workspace
        )


@dataclass(frozen=True)
class MemoryModel:
    """Bytes. A number is for one rank's whole share of the model, divided among its stages; of messages, buffers and
    workspaces for each stage. A tuple (or a list) gives each stage's own bytes, with or without the loss stage's.

        bytes   |        _                 workspace: while an action runs
                |       __|____            activations, suspended: from a stage's F to the end of its B or W
                |   ___|       |___        messages: from where one is made to the stage that uses it
                |__|               |__
                |  optimizer
                |  gradients               all the time: `.grad` is kept from step to step
                |__weights_____________  time

    Example:
        >>> memory = MemoryModel(activation=2e9, weights=1e9, gradients=1e9, optimizer=4e9)
        >>> memory.peaks(simulate(build("1f1b", num_ranks=2, num_microbatches=4)))[0].total
        10000000000.0
    """

    activation: Bytes
    """of one micro-batch, which a stage's blocks keep for their backward"""
    weights: Bytes = 0.0
    gradients: Bytes = 0.0
    """those that are kept from step to step"""
    optimizer: Bytes = 0.0
    """states, and master weights"""
    new_gradients: Bytes = 0.0
    """those that a stage's first backward makes, and that are freed before the next step"""
    gathered: Bytes = 0.0
    """whole tensors of a cube while a batch runs: parameters outside the stack, weights that are kept, and gradients of
    both"""
    suspended: Bytes = 0.0
    """of one micro-batch in the user's code outside the stack: before it in the first stage, after it in the last
    one"""
    tied: float = 0.0
    """the gradient of weights that both use, from the backward of the last stage to that of the first one"""
    queue: Bytes | None = None
    """left for `W` when `I` has freed the activations; None: they are kept until then"""
    message: Bytes = 0.0
    """a stage's output, which the next stage's rank holds until that uses it; then it is in its `activation`. And the
    gradient of this output, until the stage's backward has ended"""
    send_buffers: Bytes = 0.0
    """for the messages that a stage sends, where buffers are kept for the next ones"""
    forward_workspace: Bytes = 0.0
    """of `F` besides, while it runs"""
    backward_workspace: Bytes = 0.0
    """the same of `B` and `I`"""
    weight_workspace: Bytes = 0.0
    """the same of `W`"""

    def __post_init__(self) -> None:
        check_numbers(self, "expected a finite number of bytes of at least 0, or one per stage")

    def peaks(self, timeline: Timeline) -> tuple[RankMemory, ...]:
        """The bytes of each rank at its peak."""
        peaks = []
        for rank in range(timeline.num_ranks):
            most = max((held for _, held in self._held(timeline, rank)), key=lambda held: sum(held.values()))
            peaks.append(RankMemory(**most))
        return tuple(peaks)

    def curve(self, timeline: Timeline, rank: int) -> Curve:
        """The bytes that a rank holds: (time, bytes from then on), from the begin of the timeline."""
        return tuple((time, sum(held.values())) for time, held in self._held(timeline, rank))

    def _held(self, timeline: Timeline, rank: int) -> Iterator[tuple[float, dict[str, float]]]:
        """The bytes of a rank from each time on, by purpose."""
        now: defaultdict[str, float] = defaultdict(float)
        for name in _STANDING:
            values = self._of_stages(name, timeline)
            kind = "messages" if name == "send_buffers" else name
            now[kind] += sum(values[stage] for stage, holder in timeline.rank_of.items() if holder == rank)
        found = (one for one in self._changes(timeline, rank) if one[2] or one[1] == "activations")
        changes = sorted([(timeline.begin, "activations", 0.0), *found])
        for time, at_once in groupby(changes, key=lambda change: change[0]):
            for _, kind, change in at_once:
                now[kind] += change
            yield time, {kind: round(held, 9) for kind, held in now.items()}

    def _changes(self, timeline: Timeline, rank: int) -> Iterator[_Change]:
        """The changes on a rank, in no order of time."""
        names = (field.name for field in fields(self) if field.name not in (*_STANDING, "tied", "queue"))
        sizes = {name: self._of_stages(name, timeline) for name in names}
        queue = None if self.queue is None else self._of_stages("queue", timeline)
        for step in timeline.steps:
            spans = {span.action: span for span in step.spans if span.action.kind in COMPUTE}
            own = [span for span in spans.values() if span.rank == rank]
            for span in own:
                yield from _of_action(span, sizes, queue)
                stage, kind, microbatch = span.action.stage, span.action.kind, span.action.microbatch
                if kind is Kind.F and (source := spans.get(Action(stage - 1, Kind.F, microbatch))):
                    # then the message is a part of the activations
                    yield from _while(source.end, span.start, "messages", sizes["message"][stage - 1])
                elif kind in (Kind.B, Kind.I) and (source := _backward(spans, stage + 1, microbatch)):
                    yield from _while(source.end, span.end, "messages", sizes["message"][stage])
                if self.tied and stage == 0 and kind in (Kind.B, Kind.I):
                    last = max(action.stage for action in spans)
                    if source := _backward(spans, last, microbatch):
                        yield from _while(source.end, span.end, "gradients", self.tied)
            first = {span.action.stage: span for span in reversed(own) if span.action.kind in (Kind.B, Kind.W)}
            for stage, span in first.items():
                yield from _while(span.start, step.begin + step.makespan, "gradients", sizes["new_gradients"][stage])

    def _of_stages(self, name: str, timeline: Timeline) -> Sequence[float]:
        value: Bytes = getattr(self, name)
        shares = timeline.stage_shares
        if not isinstance(value, tuple):
            return [value] * len(shares) if name in _EACH else [value * share for share in shares]
        has_loss_stage = bool(shares) and shares[-1] == 0
        if len(value) not in (len(shares) - has_loss_stage, len(shares)):
            raise HanayoError(f"MemoryModel: {name} has {len(value)} values, the timeline {len(shares)} stages")
        return value if len(value) == len(shares) else (*value, 0.0)


def _of_action(span: Span, sizes: Mapping[str, Sequence[float]], queue: Sequence[float] | None) -> Iterator[_Change]:
    """Memory that an action keeps, frees, and takes while it runs."""
    stage, kind = span.action.stage, span.action.kind
    activation, suspended = sizes["activation"][stage], sizes["suspended"][stage]
    if kind is Kind.F:
        yield span.start, "activations", activation
        yield span.start, "suspended", suspended
    elif kind is not Kind.W:
        yield span.end, "suspended", -suspended
    if kind is Kind.B or kind is (Kind.W if queue is None else Kind.I):
        yield span.end, "activations", -activation
    if queue is not None and kind in (Kind.I, Kind.W):
        yield span.end, "queue", queue[stage] if kind is Kind.I else -queue[stage]
    yield from _while(span.start, span.end, "workspace", sizes[_WORKSPACE[kind]][stage])


def _backward(spans: Mapping[Action, Span], stage: int, microbatch: int | None) -> Span | None:
    return spans.get(Action(stage, Kind.B, microbatch)) or spans.get(Action(stage, Kind.I, microbatch))


def _while(start: float, end: float, kind: str, num_bytes: float) -> Iterator[_Change]:
    """Something that is held for a time; nothing if it has no bytes."""
    if num_bytes:
        yield start, kind, num_bytes
        yield end, kind, -num_bytes
