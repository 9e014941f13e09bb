"""Models a step of 1-D, 2-D and 3-D tensor parallelism on 1 to 64 ranks, for the 3-D paper (arXiv 2105.14450).

A step is one micro-batch through two Transformer layers, forward and backward. A dry run of the benchmark's own program
(`recipes.benchmarks.tensor3d_rank`) records what a rank multiplies, sends and waits for; the replay gives its time on a
network without latency. The numbers of ranks grow by three rules, which all end in the same step on 64 ranks:

    rule                  tokens M     hidden size h    sequences
    strong                8192         1024             64
    weak, longer batch    128 P        1024             P
    weak, wider model     8192         128 sqrt(P)      64           h rounded to a multiple of P

The only free number is the machine's: how much of its step, without overlap, 1-D communicates on those 64 ranks.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import isqrt, sqrt

from recipes.benchmarks.schemes.log import Event, Replay, replay
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, three_d
from recipes.cube.meshes import TransformerLayer, ranked_meshes

RANKS = (1, 2, 4, 8, 16, 32, 64)
SHARE = 0.7


@dataclass(frozen=True)
class Sizes:
    """The tokens of a step, the model's hidden size, and the sequences that the tokens are in."""

    tokens: int
    hidden: int
    sequences: int


def strong(_: int) -> Sizes:
    """The same step on any number of ranks."""
    return Sizes(8192, 1024, 64)


def longer_batch(num_ranks: int) -> Sizes:
    """As many sequences of 128 tokens as ranks."""
    return Sizes(128 * num_ranks, 1024, num_ranks)


def wider_model(num_ranks: int) -> Sizes:
    """As many weights on each rank."""
    return Sizes(8192, num_ranks * round(128 / sqrt(num_ranks)), 64)


@dataclass(frozen=True)
class Machine:
    """What each rank computes and receives in one unit of time."""

    operations: float
    elements: float


@cache
def machine(share: float = SHARE, sizes: Sizes | None = None) -> Machine:
    """The machine on which 1-D communicates this share of a step on 64 ranks, and computes for one unit of time."""
    alone = replay(_programs(sizes or strong(64), 64, ONE_D[0])[0], 1.0)
    return Machine(alone.computing, alone.receiving * (1 - share) / share)


@dataclass(frozen=True)
class Steps:
    """Replays of a step."""

    one_d: Replay
    two_d: Replay | None
    """None unless the number of ranks is a square"""
    cube: Replay | None
    """None unless it is a cube"""
    mesh: tuple[int, int, int]
    """the sizes with the shortest step"""
    best: Replay


@cache
def steps(sizes: Sizes, num_ranks: int, on: Machine) -> Steps:
    """Model all schemes on so many ranks."""
    side, edge = isqrt(num_ranks), round(num_ranks ** (1 / 3))
    found = meshes(sizes, num_ranks, on)
    best = min(found, key=lambda mesh: (float(f"{found[mesh].step:.9g}"), mesh))
    return Steps(
        step(sizes, num_ranks, ONE_D[0], on),
        step(sizes, num_ranks, TWO_D, on) if 1 < side**2 == num_ranks else None,
        found.get((edge, edge, edge)),
        best,
        found[best],
    )


def meshes(sizes: Sizes, num_ranks: int, on: Machine) -> dict[tuple[int, int, int], Replay]:
    """Model 3-D on all meshes."""
    layer = TransformerLayer(sizes.tokens, sizes.hidden, heads=sizes.hidden)
    return {mesh: step(sizes, num_ranks, three_d(mesh), on) for mesh in ranked_meshes(num_ranks, layer)}


def step(sizes: Sizes, num_ranks: int, name: str, on: Machine) -> Replay:
    """Replay one scheme. Of the two kinds of ranks in a square, the slower one."""
    programs = ([_timed(event, on) for event in program] for program in _programs(sizes, num_ranks, name))
    return max((replay(program, on.elements) for program in programs), key=lambda one: one.step)


def _timed(event: Event, on: Machine) -> Event:
    return replace(event, seconds=event.seconds / on.operations)


@cache
def _programs(sizes: Sizes, num_ranks: int, name: str) -> tuple[tuple[Event, ...], ...]:
    """What the ranks do, with a second for each operation."""
    import torch

    from recipes.benchmarks.tensor3d_rank import Case, dry_run

    case = Case("", num_ranks, sizes.tokens, sizes.hidden, (), 1.0, batch=sizes.sequences)
    with torch.device("meta"):
        return tuple(tuple(dry_run(case, name, rank)) for rank in ((0, 1) if name == TWO_D else (0,)))
