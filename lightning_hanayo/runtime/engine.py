"""The engine: plays one pipeline rank's program. It knows no schedule, no model and no network."""

from collections.abc import Callable, Mapping

from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.comm.point_to_point import MessageKey, PointToPointChannel
from lightning_hanayo.runtime.profiling.trace import Trace
from lightning_hanayo.runtime.program import Compute, Exchange, Program
from lightning_hanayo.runtime.random_streams import RandomStreams
from lightning_hanayo.runtime.stages.base import Stage
from lightning_hanayo.schedule import Kind


class Engine:
    """Plays programs over the stages that lie on this rank.

    Args:
        stages: this rank's stages by their number.
        mail: brings packets from and to the other ranks.
        reduce: called with a stage's number once all its gradients are there; starts their reduction over data ranks
            and twins, and mustn't wait for it: a twin may need this rank's next computation to get there.
        trace: notes when what ran.
        streams: the random streams of steps and blocks; None: torch's own generators are left as they are.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        mail: PointToPointChannel,
        reduce: Callable[[int], None],
        trace: Trace,
        streams: RandomStreams | None = None,
    ) -> None:
        self.stages = stages
        self.mail = mail
        self.trace = trace
        self._reduce = reduce
        self._streams = streams
        self._handed: dict[MessageKey, Message] = {}
        self._runs = {(number, kind): run for number, stage in stages.items() for kind, run in stage.runs().items()}

    def run(self, program: Program, batch: Batch) -> None:
        """Run `program` on `batch`. Called by all ranks of the pipeline with their own programs of one schedule."""
        self._handed.clear()
        for stage in self.stages.values():
            stage.clear()
        self.mail.begin(batch.signature)
        self.trace.begin()
        for move in program.moves:
            if isinstance(move, Compute):
                self._compute(move, batch)
            elif isinstance(move, Exchange):
                self._exchange(move)
            elif batch.reduce_gradients:
                self._keep_what_was_handed()
                self._reduce(move.stage)
        for stage in self.stages.values():
            stage.end()
        if program.trains:
            self.trace.end()

    def _keep_what_was_handed(self) -> None:
        """A gradient that waits here for its next stage may be a parameter's too (`x + p`), summed in place."""
        for route, packet in self._handed.items():
            if route.direction == "backward":
                self._handed[route] = Message(packet.skeleton, tuple(tensor.clone() for tensor in packet.tensors))

    def _exchange(self, exchange: Exchange) -> None:
        self.mail.exchange(
            [(route, peer, self._handed.pop(route)) for route, peer in exchange.sends], exchange.receives
        )

    def _compute(self, move: Compute, batch: Batch) -> None:
        action, arrives, clock = move.action, move.arrives, self.trace.clock
        assert action.microbatch is not None
        asked = clock()
        packet = None
        if arrives is not None:
            packet = self._handed.pop(arrives).detached() if move.is_local else self.mail.collect(arrives)
            self.mail.release(move.frees)
        start = clock()
        if self._streams is not None and action.kind is not Kind.W:  # a weight gradient draws no random numbers
            self._streams.begin_action(action.microbatch, action.kind)
        leaving = self._runs[action.stage, action.kind](batch, action.microbatch, packet)
        if move.leaves is not None and leaving is not None:
            self._handed[move.leaves] = leaving
        self.trace.add(action, asked, start)
