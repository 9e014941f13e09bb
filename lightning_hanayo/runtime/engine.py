"""The engine: plays one pipeline rank's program. It knows no schedule, no model and no network."""

from collections.abc import Callable, Mapping

from lightning_hanayo.runtime.mail import Mail, Route
from lightning_hanayo.runtime.packet import Packet
from lightning_hanayo.runtime.program import Exchange, Program
from lightning_hanayo.runtime.stage import Stage
from lightning_hanayo.runtime.trace import Trace
from lightning_hanayo.schedule import Action, Kind


class Engine:
    """Plays programs over the stages that lie on this rank.

    Args:
        stages: this rank's stages by their number.
        mail: brings packets from and to the other ranks.
        reduce: called with a stage's number once all its gradients are there; starts their reduction over data ranks.
        trace: notes when what ran.
    """

    def __init__(self, stages: Mapping[int, Stage], mail: Mail, reduce: Callable[[int], None], trace: Trace) -> None:
        self.stages = stages
        self.mail = mail
        self.trace = trace
        self._reduce = reduce
        self._handed: dict[Route, Packet] = {}

    def play(self, program: Program, signature: int, *, reduce: bool = True) -> None:
        """Run one batch. Called by all ranks of the pipeline with their own program and the same `signature`.

        Args:
            program: what this rank does.
            signature: the same for batches that look alike; their messages are agreed.
            reduce: whether gradients are reduced; not while batches accumulate.
        """
        self._handed.clear()
        for stage in self.stages.values():
            stage.clear()
        self.mail.begin(signature)
        self.trace.begin()
        for move in program.moves:
            if isinstance(move, Exchange):
                self._exchange(move)
            elif move.kind is not Kind.REDUCE_GRAD:
                self._compute(move, program)
            elif reduce:
                self._reduce(move.stage)
        self.mail.finish()
        if program.trains:
            self.trace.end()

    def _exchange(self, exchange: Exchange) -> None:
        self.mail.exchange(
            [(route, peer, self._handed.pop(route)) for route, peer in exchange.sends], exchange.receives
        )

    def _compute(self, action: Action, program: Program) -> None:
        stage, microbatch, forward = action.stage, action.microbatch, action.kind is Kind.F
        assert microbatch is not None
        asked = self.trace.clock()
        arriving, leaving = (stage - 1, stage) if forward else (stage, stage - 1)
        packet = self._arrived(program, Route(arriving, "forward" if forward else "backward", microbatch))
        start = self.trace.clock()
        run = self.stages[stage].forward if forward else self.stages[stage].backward
        result = run(microbatch, packet)
        if result is not None and 0 <= leaving < len(program.stage_ranks) - 1:
            self._handed[Route(leaving, "forward" if forward else "backward", microbatch)] = result
        self.trace.add(action, asked, start)

    def _arrived(self, program: Program, route: Route) -> Packet | None:
        if not 0 <= route.stage < len(program.stage_ranks) - 1:
            return None
        return self._handed.pop(route) if program.is_local(route.stage) else self.mail.collect(route)
