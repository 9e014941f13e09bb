"""Ranks that train in lockstep, with their monitors, in one thread: what happens next is chosen from outside.

A rank begins a batch by itself, but ends it only once all have begun it, as in a pipeline. Messages of monitors arrive
in any order; between two answers to a question anything else may happen.
"""

from collections.abc import Callable
from typing import Any

from lightning_hanayo.strategy.stopping import Decision, StopTogether

Choose = Callable[[int], int]
"""Returns a number below its argument."""


class World:
    """All ranks, and what can happen next. Each rank trains `num_batches`, and is held in frozen ones."""

    def __init__(self, num_ranks: int, num_batches: int, choose: Choose, *, frozen: int | None = None) -> None:
        self.choose, self.num_batches, self.frozen = choose, num_batches, frozen
        self.waiting: list[Callable[[], object]] = []
        """messages on their way, and threads that have been started"""
        self.verdict: Any = None
        self.now = 0.0
        self.ranks = [Rank(rank, num_ranks, self) for rank in range(num_ranks)]

    def run(self) -> None:
        """Until nothing more can happen."""
        idle = 0
        while idle < 400:  # looks that find nothing
            moved = self.happen()
            idle = 0 if moved else idle + 1

    def happen(self) -> bool:
        """Let one thing happen; return whether anything has changed."""
        self.now += 0.01
        number = self.choose(len(self.waiting) + len(self.ranks))
        if number < len(self.waiting):
            self.waiting.pop(number)()
            return True
        rank = self.ranks[number - len(self.waiting)]
        if rank.rank == self.frozen:
            return False
        return rank.train()


class Rank:
    """One rank: its main thread, and the `Monitors` of its process."""

    def __init__(self, rank: int, num_ranks: int, world: World) -> None:
        self.rank, self.num_ranks, self.world = rank, num_ranks, world
        self.handlers: dict[str, Callable[[int, Any], object]] = {}
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.begun = 0
        self.decided: Any = None
        self.is_over = False
        self.stopped_by: Decision | None = None
        self.failed_for: int | None = None
        self.stop = StopTogether(self)  # type: ignore[arg-type]

    # the failures

    run = 1
    position = (0, 0, 0, 0)

    @property
    def monitor(self) -> "Rank":
        return self

    def check_peers(self) -> None: ...

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def fail_for(self, rank: int, what: str, *, code: int) -> None:
        self.failed_for = rank

    # the main thread

    def train(self) -> bool:
        """Begin the next batch, if the last one has ended on all ranks."""
        is_held = self.stop._is_held and self.stop.decision is None
        if self.is_over or is_held or any(other.begun < self.begun for other in self.world.ranks):
            return False
        if self.begun == self.world.num_batches:
            self.stop.close()
            self.is_over = True
            return True
        self.stopped_by = self.stop.begin((self.begun + 1, 0))
        self.is_over = self.stopped_by is not None
        self.begun += not self.is_over
        return True

    # the monitor

    @property
    def arbiter(self) -> int:
        return 0 if self.world.frozen != 0 else 1

    def state_of(self, rank: int) -> str:
        return "running"

    def tell(self, kind: str, content: Any) -> None:
        for other in self.world.ranks:
            self.world.waiting.append(lambda other=other: other.receive(self.rank, kind, content))  # type: ignore[misc]

    def propose(self, topic: str, proposal: Any) -> None:
        self.decided = self.decided or proposal

    def verdict(self, topic: str, *, wait: float = 0.0) -> Any:
        self.world.now += wait
        return self.decided

    def receive(self, sender: int, kind: str, content: Any) -> None:
        if kind == "verdict":
            self.decided = content["verdict"]
        if kind in self.handlers and self.rank != self.world.frozen:
            self.handlers[kind](sender, content)

    def on(self, kind: str, handler: Callable[[int, Any], object]) -> Callable[[], None]:
        self.handlers[kind] = handler
        return lambda: _remove(self.handlers, kind)

    def answer(self, question: str, function: Callable[[Any], Any]) -> Callable[[], None]:
        self.answers[question] = function
        return lambda: _remove(self.answers, question)

    def ask(self, question: str) -> dict[int, Any]:
        found = {}
        for other in self.world.ranks:
            for _ in range(self.world.choose(4)):
                self.world.happen()
            if other.rank != self.world.frozen and question in other.answers:
                found[other.rank] = other.answers[question](None)
        return found

    def settle(self, topic: str, judge: Callable[[dict[int, Any]], Any], *, within: float) -> Any:
        deadline = self.world.now + within
        answers = self.ask(topic)
        while len(answers) < self.num_ranks and self.world.now < deadline:
            self.world.now += 0.1
            answers |= self.ask(topic)
        if self.world.verdict is None:
            self.world.verdict = judge(answers)
            self.tell("verdict", {"topic": topic, "verdict": self.world.verdict})
        return self.world.verdict


class Threads:
    """Takes the place of the module `threading`: what a thread would run happens some time later."""

    def __init__(self, world: World) -> None:
        self.world = world

    def Thread(self, target: Callable[..., object], args: tuple[Any, ...], **_: Any) -> Any:
        class Started:
            start = staticmethod(lambda: self.world.waiting.append(lambda: target(*args)))

        return Started


class Time:
    """Takes the place of the module `time`."""

    def __init__(self, world: World) -> None:
        self.world = world

    def monotonic(self) -> float:
        return self.world.now

    def sleep(self, seconds: float) -> None:
        self.world.now += seconds


def _remove(functions: dict[str, Any], name: str) -> None:
    functions.pop(name, None)
