"""The rounds: what each rank does. All candidates play once per round, each round begins with another one."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_hanayo.schedule import simulate
from recipes.benchmarks.bare import BarePlayer
from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.machine import oversleep
from recipes.benchmarks.ours import OurPlayer
from recipes.benchmarks.peer import TorchPlayer
from recipes.benchmarks.player import Player

WARM_UP = 3
HEAD_START = 0.002
"""seconds between an agreement on a start and the start"""


_PLAYERS: dict[str, Callable[[Case, Candidate], Player]] = {
    "ours": OurPlayer,
    "torch": TorchPlayer,
    "bare": BarePlayer,
}


@dataclass(frozen=True)
class Played:
    """One candidate in one round on one rank. Times in seconds of the machine's monotonic clock."""

    start: float
    ends: tuple[float, ...]
    """of each step"""
    cpu: float
    """seconds of all the process's threads, in all steps"""


@dataclass(frozen=True)
class Record:
    """What a rank knows of a candidate."""

    rounds: tuple[Played, ...]
    gradients: dict[int, float]
    losses: tuple[float, ...]
    ideal: tuple[float, ...]
    """seconds that each step adds if messages and the runtime cost nothing"""
    peaks: tuple[float, ...]
    """activations per rank, in M_a"""
    num_actions: tuple[int, ...]
    """per rank, in a step"""
    num_stages: int


@dataclass(frozen=True)
class Records:
    """What a rank brings home from a case."""

    records: dict[Candidate, Record]
    refused: dict[Candidate, str]
    """what a runtime can't play, and why"""
    oversleep: float
    """how late a stage's sleep ends, in seconds"""


@dataclass(frozen=True)
class Plan:
    """The cases, their candidates, and how many rounds."""

    cases: tuple[Case, ...]
    candidates: tuple[Candidate, ...]
    num_rounds: int


def play_all(rank: int, plan: Plan) -> list[Records]:
    """A rank's work: one case after the other."""
    return [_play_case(case, plan) for case in plan.cases]


def _play_case(case: Case, plan: Plan) -> Records:
    players, refused = _players(case, plan.candidates)
    for player in players.values():
        for _ in range(WARM_UP):
            player.forget_gradients()
            player.play()
    rounds: dict[Candidate, list[Played]] = {candidate: [] for candidate in players}
    order = list(players)
    for turn in range(plan.num_rounds):
        first = turn % len(order) if order else 0
        for candidate in order[first:] + order[:first]:
            rounds[candidate].append(play(players[candidate], case.steps))
    records = {candidate: _record(player, rounds[candidate], case) for candidate, player in players.items()}
    return Records(records, refused, oversleep(case.forward) if case.forward else 0.0)


def _players(case: Case, candidates: tuple[Candidate, ...]) -> tuple[dict[Candidate, Player], dict[Candidate, str]]:
    players: dict[Candidate, Player] = {}
    refused: dict[Candidate, str] = {}
    for candidate in candidates:
        kind = _PLAYERS[candidate.runtime]
        try:
            players[candidate] = kind(case, candidate)
        except (ValueError, AssertionError) as error:  # the same one on all ranks
            refused[candidate] = " ".join(str(error).split())
    return players, refused


def play(player: Player, steps: int) -> Played:
    """Steps back to back, which all ranks begin at the same moment."""
    begin = _agreed_start()
    while (left := begin - time.monotonic()) > 0:
        time.sleep(left)
    cpu, start = time.process_time(), time.monotonic()
    ends = []
    for _ in range(steps):
        player.forget_gradients()
        player.play()
        ends.append(time.monotonic())
    return Played(start, tuple(ends), time.process_time() - cpu)


def _agreed_start() -> float:
    """A barrier that ends at the same time for all ranks, whose clock is one: soon after the last one came."""
    start = torch.tensor([time.monotonic() + HEAD_START], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    return start.item()


def _record(player: Player, rounds: list[Played], case: Case) -> Record:
    timeline = simulate(player.schedule, case.costs, steps=case.steps)
    return Record(
        tuple(rounds),
        player.gradients,
        tuple(player.losses),
        timeline.step_times,
        timeline.steps[0].peak_activations if case.forward else simulate(player.schedule).peak_activations,
        tuple(map(len, player.schedule.actions)),
        player.schedule.num_stages,
    )
