"""The engine: runs the program of one pipeline rank. It depends on no schedule, model or network backend.

The program: the list of everything one pipeline rank does in a batch, worked out once from the schedule.

Each computation knows the keys of the messages it needs and makes. Consecutive messages start together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch

from lightning_hanayo.overlap.turns import DeviceTurns
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.threads import ThreadState
from lightning_hanayo.pipeline_parallel.nan import MadeValues
from lightning_hanayo.pipeline_parallel.p2p import Message, MessageKey, PointToPointChannel
from lightning_hanayo.pipeline_parallel.rng import NO_STREAMS, RandomStreams
from lightning_hanayo.pipeline_parallel.stages import Stage
from lightning_hanayo.pipeline_parallel.trace import Trace, action_range, is_profiling
from lightning_hanayo.schedule import Action, Kind, Schedule, complete
from lightning_hanayo.schedule.table import source_stage, target_stage
from lightning_hanayo.seeds import mix


@dataclass(frozen=True)
class Communicate:
    """Messages whose transfers start together: the key and the other pipeline rank of each."""

    sends: tuple[tuple[MessageKey, int], ...]
    receives: tuple[tuple[MessageKey, int], ...]


@dataclass(frozen=True)
class Compute:
    """An action of a stage, and the keys of its messages: None at the ends of the model, and for a weight gradient."""

    action: Action
    input_key: MessageKey | None
    output_key: MessageKey | None
    is_local: bool
    """whether the message it needs was made on this rank"""
    is_last_gradient: bool = False
    """whether no later action makes gradients of its stage's weights"""


@dataclass(frozen=True)
class Pair:
    """Two computations, of different micro-batches, that run at once."""

    first: Compute
    second: Compute

    @property
    def may_run_at_once(self) -> bool:
        """Whether it is a forward and a backward.

        User code would see two forwards, and two backwards would add in another order than that of micro-batches.
        """
        return (self.first.action.kind is Kind.F) != (self.second.action.kind is Kind.F)


@dataclass(frozen=True)
class Program:
    """What one rank does, in order. A bare action is the reduction of its stage's gradients."""

    steps: tuple[Compute | Pair | Communicate | Action, ...]
    is_whole: bool
    """whether it has forward and backward of each micro-batch"""

    @staticmethod
    def from_schedule(schedule: Schedule, rank: int) -> "Program":
        """The program of pipeline rank `rank` in `schedule`."""
        own = schedule.actions[rank]
        last = {action.stage: action for action in own if action.kind in _MAKES_GRADIENTS}
        steps: list[Compute | Pair | Communicate | Action] = []
        for is_message, run in groupby(complete(schedule)[rank], key=lambda action: action.kind.is_message):
            if is_message:
                steps.append(_communicate(run, schedule))
            else:
                actions = [_compute(a, schedule, a == last.get(a.stage)) if a.kind.is_compute else a for a in run]
                steps.extend(_paired(actions, schedule))
        forwards, backwards = (
            {(action.stage, action.microbatch) for action in own if action.kind in kinds}
            for kinds in ((Kind.F,), (Kind.B, Kind.I))
        )
        return Program(tuple(steps), forwards == backwards != set())


_MAKES_GRADIENTS = (Kind.B, Kind.W)
_METHODS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward_input", Kind.W: "backward_weight"}
"""of a stage, which run its actions"""


def _paired(run: Sequence[Compute | Action], schedule: Schedule) -> Iterator[Compute | Pair | Action]:
    """The actions between messages, with those that run at once in one step."""
    rest = iter(run)
    for one in rest:
        if isinstance(one, Compute) and one.action in schedule.partner_of:
            second = next(rest)
            assert isinstance(second, Compute), "a pair's actions are neighbours"
            yield Pair(one, second)
        else:
            yield one


def _compute(action: Action, schedule: Schedule, is_last_gradient: bool) -> Compute:
    num_stages = schedule.num_stages
    source, target = source_stage(action, num_stages), target_stage(action, num_stages)
    is_local = source is not None and schedule.stage_ranks[source] == schedule.stage_ranks[action.stage]
    input_key = None if source is None else _key(action, source)
    output_key = None if target is None else _key(action, target)
    return Compute(action, input_key, output_key, is_local, is_last_gradient)


def _communicate(run: Iterable[Action], schedule: Schedule) -> Communicate:
    sends, receives, num_stages = [], [], schedule.num_stages
    for action in run:
        source, target = source_stage(action, num_stages), target_stage(action, num_stages)
        if target is not None:
            sends.append((_key(action, target), schedule.stage_ranks[target]))
        elif source is not None:
            receives.append((_key(action, source), schedule.stage_ranks[source]))
    return Communicate(tuple(sends), tuple(receives))


def _key(action: Action, other: int) -> MessageKey:
    """The key of the message between the stage of `action` and stage `other`."""
    assert action.microbatch is not None
    direction: Literal["forward", "backward"] = "forward" if action.kind.is_forward else "backward"
    return MessageKey(min(action.stage, other), direction, action.microbatch)


@dataclass(eq=False, repr=False)
class Engine:
    """Runs programs over the stages of this rank."""

    stages: Mapping[int, Stage]
    """by stage number"""
    channel: PointToPointChannel
    reduce_gradients: Callable[[int], None]
    """Called with a stage's number when all its gradients are complete. It starts their reduction over data ranks and
    over copies of the stage. It must not wait for it: another rank may need this rank's next computation to get there.
    """
    trace: Trace
    before_forward: Callable[[int], None] = field(default=lambda _: None, kw_only=True)
    """called with a stage's number before each of its forwards, so that its parameters are there"""
    streams: RandomStreams = field(default=NO_STREAMS, kw_only=True)
    """the random streams of steps and blocks"""
    values: MadeValues = field(default_factory=MadeValues, kw_only=True)
    """notes what stages make; it is off unless somebody turns it on"""
    turns: DeviceTurns | None = field(default=None, kw_only=True)
    """of the actions of a pair; None: they run one after the other"""
    _messages: dict[MessageKey, Message] = field(default_factory=dict, init=False)
    """made on this rank, and not yet sent or used by another stage of this rank"""
    num_steps: int = field(default=0, init=False)
    """of all programs, that this rank has run: others see that it moves"""
    action: Action | None = field(default=None, init=False)
    """the latest one that began, until its program has ended: reports of hangs name it"""

    def begin_batch(self) -> None:
        """Called before the programs of each batch."""
        self._messages.clear()
        for stage in self.stages.values():
            stage.begin_batch()

    def run(self, program: Program, batch: Batch, *, continues: bool = False) -> None:
        """Run `program` on `batch`. Called by all ranks of the pipeline with their own programs of one schedule.

        `continues`: the program before had the forwards of this one's backwards, and no others.
        """
        number = batch.pass_number
        self.channel.begin_batch(mix(batch.signature, number) if number else batch.signature)
        if not continues:
            self.trace.begin()
        clock = self.trace.clock
        # Backwards run in the calling thread: handing each entry to a device's takes up to 0.2 ms of a GPU's host.
        with torch.autograd.set_multithreading_enabled(False):
            for step in program.steps:
                self.num_steps += 1
                if isinstance(step, Communicate):
                    sends = [(key, peer, self._messages.pop(key)) for key, peer in step.sends]
                    self.channel.start_transfers(sends, step.receives)
                elif isinstance(step, Action):
                    self.stages[step.stage].hooks.finish_gradients()
                    if batch.reduce_gradients:
                        self._copy_waiting_gradients()
                        self.reduce_gradients(step.stage)
                elif isinstance(step, Pair) and self.turns is not None and step.may_run_at_once:
                    self._run_pair(step, batch, self.turns)
                else:
                    for one in (step.first, step.second) if isinstance(step, Pair) else (step,):
                        # an event takes the host as long as a kernel
                        reached = clock.mark() if one.input_key is not None and not one.is_local else None
                        start, end = self._run_action(one, batch, self._receive(one))
                        self.trace.add(one.action, start if reached is None else reached, start, end)
        self.action = None
        if program.is_whole or continues:
            self.trace.end()

    def end_batch(self) -> None:
        """Called after the programs of each batch."""
        for stage in self.stages.values():
            stage.end_batch()

    def _copy_waiting_gradients(self) -> None:
        """Copy gradients that wait here for their stage: one may also be a parameter's (`x + p`), reduced in place."""
        for key, message in self._messages.items():
            if key.direction == "backward":
                self._messages[key] = Message(message.skeleton, tuple(tensor.clone() for tensor in message.tensors))

    def _run_pair(self, pair: Pair, batch: Batch, turns: DeviceTurns) -> None:
        steps, reached, state = (pair.first, pair.second), self.trace.clock.mark(), ThreadState.current()
        first, second = [self._receive(step) for step in steps]

        def act_second() -> tuple[Any, Any]:
            # as in the first one's thread: a device's own would run one of both backwards at a time
            with state.applied(), torch.autograd.set_multithreading_enabled(False):
                return self._run_action(pair.second, batch, second)

        marks = turns.run(lambda: self._run_action(pair.first, batch, first), act_second)
        for step, own in zip(steps, marks, strict=True):
            self.trace.add(step.action, reached, *own)

    def _receive(self, step: Compute) -> Message | None:
        """The message that the action needs."""
        source = step.input_key
        if source is None:
            return None
        return self._messages.pop(source).detached() if step.is_local else self.channel.wait_receive(source)

    def _run_action(self, step: Compute, batch: Batch, received: Message | None) -> tuple[Any, Any]:
        """Run an action, and return the clock's marks of its start and its end."""
        action, clock = step.action, self.trace.clock
        assert action.microbatch is not None
        start = clock.mark()
        self.action = action
        if action.kind is Kind.F:
            self.before_forward(action.stage)
        if step.is_last_gradient:
            self.stages[action.stage].hooks.expect_last_gradients()
        self.streams.begin_action(action.microbatch, action.kind, batch.pass_number)
        self.values.action = action.microbatch, batch.pass_number, action.kind is Kind.F
        run = getattr(self.stages[action.stage], _METHODS[action.kind])
        try:
            if is_profiling():
                with action_range(action):
                    made = run(batch, action.microbatch, received)
            else:
                made = run(batch, action.microbatch, received)
        except Exception as error:
            batch.note_microbatch(error, action.microbatch)
            raise
        if made is not None:
            if action.kind is not Kind.F:
                self.values.note_gradients(action.stage, made.tensors)
            if step.output_key is not None:
                self._messages[step.output_key] = made
        return start, clock.mark()
