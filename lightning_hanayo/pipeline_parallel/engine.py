"""The engine: runs the program of one pipeline rank. It depends on no schedule, model or network backend."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.comm.message import Message, MessageKey
from lightning_hanayo.runtime.comm.point_to_point import PointToPointChannel
from lightning_hanayo.runtime.pairs import Pairs
from lightning_hanayo.runtime.profiling.memory_trace import MemoryWatch
from lightning_hanayo.runtime.profiling.ranges import action_range, is_profiling
from lightning_hanayo.runtime.profiling.trace import Trace
from lightning_hanayo.runtime.program import Communicate, Compute, Pair, Program
from lightning_hanayo.runtime.random_streams import RandomStreams
from lightning_hanayo.runtime.stages.base import Stage
from lightning_hanayo.runtime.values import MadeValues
from lightning_hanayo.schedule import Action, Kind
from lightning_hanayo.seeds import mix


def _ignore(stage: int) -> None:
    """Called where parameters are always there."""


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
    before_forward: Callable[[int], None] = field(default=_ignore, kw_only=True)
    """called with a stage's number before each of its forwards, so that its parameters are there"""
    streams: RandomStreams | None = field(default=None, kw_only=True)
    """the random streams of steps and blocks; None: torch's own generators are left as they are"""
    values: MadeValues = field(default_factory=MadeValues, kw_only=True)
    """notes what stages make; it is off unless somebody turns it on"""
    memory: MemoryWatch = field(default_factory=MemoryWatch, kw_only=True)
    """measures what actions hold, if it is a `MemoryTrace`"""
    pairs: Pairs | None = field(default=None, kw_only=True)
    """runs pairs of actions; None: their actions run one after the other"""
    _messages: dict[MessageKey, Message] = field(default_factory=dict, init=False)
    """made on this rank, and not yet sent or used by another stage of this rank"""
    num_steps: int = field(default=0, init=False)
    """of all programs, that this rank has run: others see that it moves"""
    action: Action | None = field(default=None, init=False)
    """the latest one that began, until its program has ended: reports of hangs name it"""

    def __post_init__(self) -> None:
        self._actions = {(n, kind): run for n, stage in self.stages.items() for kind, run in stage.actions().items()}

    def begin_batch(self) -> None:
        """Called before the programs of each batch."""
        self._messages.clear()
        for stage in self.stages.values():
            stage.begin_batch()

    def run(self, program: Program, batch: Batch) -> None:
        """Run `program` on `batch`. Called by all ranks of the pipeline with their own programs of one schedule."""
        number = batch.pass_number
        self.channel.begin_batch(mix(batch.signature, number) if number else batch.signature)
        if self.streams is not None:
            self.streams.begin_pass(number)
        self.trace.begin()
        if self.pairs is not None:
            keeps_weights = any(stage.hooks.keeps_weights for stage in self.stages.values())
            edges = program.edges if keeps_weights else frozenset()
            self.pairs.begin_batch(mix(batch.signature, number), program.pairs, edges)
        for step in program.steps:
            self.num_steps += 1
            if isinstance(step, Compute):
                self._compute(step, batch)
            elif isinstance(step, Pair):
                self._pair(step, batch)
            elif isinstance(step, Communicate):
                self._communicate(step)
            else:
                self.stages[step.stage].hooks.finish_gradients()
                if batch.reduce_gradients:
                    self._copy_waiting_gradients()
                    self.reduce_gradients(step.stage)
        self.action = None
        if program.is_whole:
            self.trace.end()

    def end_batch(self) -> None:
        """Called after the programs of each batch."""
        for stage in self.stages.values():
            stage.end_batch()

    def _communicate(self, step: Communicate) -> None:
        sends = [(key, peer, self._messages.pop(key)) for key, peer in step.sends]
        if not self.memory.is_measuring:
            self.channel.start_transfers(sends, step.receives)
            return
        with self.memory.transfers():
            self.channel.start_transfers(sends, step.receives)

    def _copy_waiting_gradients(self) -> None:
        """Copy gradients that wait here for their stage: one may also be a parameter's (`x + p`), reduced in place."""
        for key, message in self._messages.items():
            if key.direction == "backward":
                self._messages[key] = Message(message.skeleton, tuple(tensor.clone() for tensor in message.tensors))

    def _compute(self, step: Compute, batch: Batch) -> None:
        reached = self.trace.clock.mark()
        if not self.memory.is_measuring:
            self.trace.add(step.action, reached, *self._run(step, batch, self._receive(step)))
            return
        with self.memory.action(step.action):
            self.trace.add(step.action, reached, *self._run(step, batch, self._receive(step)))
            self.memory.note_kept(step.action.stage, self.stages[step.action.stage].hooks.kept)

    def _pair(self, pair: Pair, batch: Batch) -> None:
        if self.pairs is None or self.memory.is_measuring or not self._may_run_at_once(pair):
            for one in (pair.first, pair.second):
                self._compute(one, batch)
            return
        first, second = pair.first, pair.second
        reached = self.trace.clock.mark()
        received = [self._receive(one) for one in (first, second)]
        ran = self.pairs.run(
            first.action,
            lambda: self._run(first, batch, received[0]),
            second.action,
            lambda: self._run(second, batch, received[1]),
        )
        for step, marks in zip((first, second), ran, strict=True):
            self.trace.add(step.action, reached, *marks)

    def _may_run_at_once(self, pair: Pair) -> bool:
        actions = pair.first.action, pair.second.action
        if (actions[0].kind is Kind.F) != (actions[1].kind is Kind.F):
            return True
        stages = [self.stages[action.stage] for action in actions]
        return all(stage.allows_twins and stage.hooks.allows_twins for stage in stages)

    def _receive(self, step: Compute) -> Message | None:
        """The message that the action needs."""
        source = step.input_key
        if source is None:
            return None
        return self._messages.pop(source).detached() if step.is_local else self.channel.wait_receive(source)

    def _run(self, step: Compute, batch: Batch, received: Message | None) -> tuple[Any, Any]:
        """Run an action, and return the clock's marks of its start and its end."""
        action, clock = step.action, self.trace.clock
        assert action.microbatch is not None
        start = clock.mark()
        self.action = action
        if received is not None:
            self.memory.note_input(received)
        if action.kind is Kind.F:
            self.before_forward(action.stage)
        if step.is_last_gradient:
            self.stages[action.stage].hooks.expect_last_gradients()
        if self.streams is not None and action.kind is not Kind.W:  # a weight gradient draws no random numbers
            self.streams.begin_action(action.microbatch, action.kind)
        self.values.begin_action(action.microbatch, batch.pass_number, is_forward=action.kind is Kind.F)
        run = self._actions[action.stage, action.kind]
        try:
            if is_profiling() or torch.is_anomaly_enabled():
                with self.values.explaining(action.stage), action_range(action):
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
                self.memory.note_output(made)
        return start, clock.mark()
