"""Runs only the sleeps and messages of a schedule: the least time that any runtime on this machine can need.

Buffers are allocated before a step begins, and no tensor is computed or read. What is left is how late sleeps end, and
what gloo needs for a message.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.engine import Communicate, Compute, Program
from lightning_hanayo.pipeline_parallel.message import MessageKey
from lightning_hanayo.pipeline_parallel.transport import Transport, Work
from lightning_hanayo.schedule import Kind
from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.harness import sleep_until
from recipes.benchmarks.ours import world_transport
from recipes.benchmarks.runner import Runner

Buffer = tuple[MessageKey, int, torch.Tensor]
"""message key, the peer's rank, and the buffer"""


@dataclass(frozen=True)
class _Transfers:
    sends: tuple[Buffer, ...]
    receives: tuple[Buffer, ...]


@dataclass(frozen=True)
class _Sleep:
    awaits: MessageKey | None
    seconds: float


class BareRunner(Runner):
    """Runs the same program as our engine."""

    def __init__(self, case: Case, candidate: Candidate) -> None:
        self.schedule = case.schedule(candidate)
        self.stages = {}
        self._transport: Transport = world_transport()
        times = case.times(self.schedule.num_stages)
        seconds = {
            Kind.F: times.forward,
            Kind.B: times.backward_input + times.backward_weight,
            Kind.I: times.backward_input,
            Kind.W: times.backward_weight,
        }
        self._instructions: list[_Transfers | _Sleep] = []
        for move in Program.from_schedule(self.schedule, dist.get_rank()).steps:
            if isinstance(move, Compute):
                awaits = None if move.is_local else move.input_key
                self._instructions.append(_Sleep(awaits, seconds[move.action.kind]))
            elif isinstance(move, Communicate):
                sends, receives = (
                    tuple((key, peer, torch.zeros(case.width)) for key, peer in messages)
                    for messages in (move.sends, move.receives)
                )
                self._instructions.append(_Transfers(sends, receives))

    @override
    def run_step(self) -> None:
        arriving: dict[MessageKey, Work] = {}
        leaving: list[Work] = []
        for instruction in self._instructions:
            if isinstance(instruction, _Sleep):
                if instruction.awaits is not None:
                    arriving.pop(instruction.awaits).wait()
                sleep_until(time.monotonic() + instruction.seconds)
                continue
            leaving += [self._transport.send(peer, key.tag, buffer) for key, peer, buffer in instruction.sends]
            for key, peer, buffer in instruction.receives:
                arriving[key] = self._transport.receive(peer, key.tag, buffer)
        for work in leaving:
            work.wait()

    @property
    @override
    def losses(self) -> list[float]:
        return []
