"""Candidate: one complete layout of a run, and the list of all that fit a model and a number of devices."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import isqrt, prod
from typing import NamedTuple

from lightning_hanayo.divisibility import MeshSizes, meshes
from lightning_hanayo.planner.communication_volume import CubeOutside, CubeWeights, Experts
from lightning_hanayo.planner.model_facts import ModelFacts
from lightning_hanayo.schedule.registry import WAVES
from lightning_hanayo.topology import Topology

MICROBATCHES_PER_RANK = 8
"""micro-batches of a batch, for each pipeline rank: with more the bubble hardly shrinks, and tables get long"""
MOST_MICROBATCHES = 64
WHOLE, SPLIT, ONE_RANK = "hanayo", "hanayo-zb", "1f1b"
"""the schedules of a candidate: a wave with the backward in one piece, or in two; on one pipeline rank there is none"""


@dataclass(frozen=True)
class Candidate:
    """One layout. The samples of an optimizer step are data * samples * num_microbatches * accumulate.

    Example:
        >>> Candidate(data=2, pipe=4, num_waves=2, samples=1, num_microbatches=16).batch_size
        16
    """

    data: int = 1
    pipe: int = 1
    mesh: MeshSizes = (1, 1, 1)
    num_waves: int = 1
    samples: int = 1
    """of a micro-batch of one data rank, which the ranks of a cube share"""
    num_microbatches: int = 1
    accumulate: int = 1
    """batches in an optimizer step"""
    schedule: str = SPLIT
    recompute: bool = False
    """whether blocks run again in the backward"""
    shard_optimizer: bool = False
    cube_weights: CubeWeights = "microbatch"
    """how often a cube gathers its weights"""
    pairs: bool = False
    """whether ranks work on two micro-batches at once"""
    runs_step_once: bool = False
    """whether code outside the stack runs on the whole batch, while the other ranks wait"""
    experts: Experts = "whole"
    """where experts are while a batch runs"""
    cube_outside: CubeOutside = "share"
    """what a cube's ranks get of a micro-batch outside the stack"""

    @cached_property
    def cube_size(self) -> int:
        """Ranks of a cube."""
        return prod(self.mesh)

    @property
    def runs_alike(self) -> bool:
        """Whether code outside the stack runs on the same samples on all ranks of a cube."""
        return self.cube_size > 1 and (self.runs_step_once or self.cube_outside != "share")

    @property
    def stages_per_rank(self) -> int:
        """V: two for each wave, or one stage on one pipeline rank."""
        return 2 * self.num_waves if self.pipe > 1 else 1

    @property
    def topology(self) -> Topology:
        """How its ranks lie."""
        return Topology(self.data, self.pipe, self.mesh)

    @property
    def batch_size(self) -> int:
        """Samples of a batch of one data rank: what its DataLoader gives."""
        return self.samples * self.num_microbatches

    @property
    def samples_per_step(self) -> int:
        """Of all data ranks."""
        return self.data * self.batch_size * self.accumulate

    @property
    def whole_name(self) -> str:
        """All of it in words."""
        choices = {
            self.schedule: self.pipe > 1,
            "blocks recomputed": self.recompute,
            "optimizer sharded": self.shard_optimizer,
            "weights gathered once a batch": self.cube_weights == "batch",
            "two micro-batches at once": self.pairs,
            "the step once on whole batches": self.runs_step_once,
            "experts shared over the cube": self.experts == "cube",
            "embedding and head sharded": self.cube_outside == "tokens",
        }
        batches = f" x {self.accumulate} batches" if self.accumulate > 1 else ""
        return ", ".join([f"{self}{batches}", *(name for name, holds in choices.items() if holds)])

    def __str__(self) -> str:
        waves = f" x W={self.num_waves}" if self.pipe > 1 else ""
        cube = f", cube {'x'.join(map(str, self.mesh))}" if self.cube_size > 1 else ""
        return f"P={self.pipe}{waves}, D={self.data}{cube}, B={self.num_microbatches} of {self.samples}"


@dataclass(frozen=True)
class Choices:
    """What a plan chooses from in a cube. One value is what has been decided.

    `runs_step_once`: with `step="batch"`; that excludes pairs. `experts` are chosen where there are any, and "tokens",
    if there are others, where a run accepts them.
    """

    cube_weights: tuple[CubeWeights, ...] = ("microbatch", "batch")
    pairs: tuple[bool, ...] = (False, True)
    runs_step_once: bool = False
    experts: tuple[Experts, ...] = ("whole", "cube")
    cube_outside: tuple[CubeOutside, ...] = ("share", "tokens")


ALL = Choices()


class BatchesOfStep(NamedTuple):
    """What each data rank trains on in an optimizer step, however many data ranks there are."""

    size: int
    """samples of a batch"""
    batches: int


def candidates(
    facts: ModelFacts,
    num_devices: int,
    step: int | BatchesOfStep,
    refused: Counter[str],
    choices: Choices = ALL,
) -> Iterator[Candidate]:
    """All layouts that divide. `refused` counts the others, by reason.

    Of the ways to cut a data rank's samples into micro-batches it takes, for each size of a micro-batch that doubles
    from the smallest on, the most micro-batches per batch that are worth it; the rest are batches of their own. If a
    data rank's batch has a given size, it takes all ways to cut it evenly.

    `step`: the samples of an optimizer step, of all data ranks; or the batches of each data rank.
    """
    for data, pipe, mesh, least in _topologies(facts, num_devices, step, refused):
        cuts = list(_cuts(step // data, least, pipe) if isinstance(step, int) else _cuts_of(step, least))
        for num_waves in WAVES if pipe > 1 else (1,):
            if pipe > 1 and 2 * pipe * num_waves > len(facts.blocks):
                refused[f"more stages than the {len(facts.blocks)} blocks"] += 1
                continue
            for cut in cuts:
                yield from _choose(facts, (data, pipe, mesh, num_waves, *cut), refused, choices)


def _topologies(
    facts: ModelFacts, num_devices: int, step: int | BatchesOfStep, refused: Counter[str]
) -> Iterator[tuple[int, int, MeshSizes, int]]:
    """Data ranks, pipeline ranks, cube, and the fewest samples of a micro-batch."""
    for cube_size in _divisors(num_devices):
        for mesh in meshes(cube_size):
            wrong = [one for one in facts.required if not one.holds(mesh)]
            # all ranks share the samples of unregistered blocks; those of others are shared over x
            least, shared = (mesh[0], "x") if facts.is_registered else (cube_size, "ranks of a cube")
            for pipe in _divisors(num_devices // cube_size):
                data = num_devices // (cube_size * pipe)
                samples = step if isinstance(step, int) else data * prod(step)
                if wrong:
                    refused[f"{wrong[0].what} don't divide over the cube"] += 1
                elif samples % (data * least):
                    refused[f"{samples} samples don't divide over data ranks and {shared}"] += 1
                else:
                    yield data, pipe, mesh, least


def _choose(
    facts: ModelFacts, sizes: tuple[int, int, MeshSizes, int, int, int, int], refused: Counter[str], choices: Choices
) -> Iterator[Candidate]:
    """All choices that make a difference for a layout of these sizes, and that a run accepts."""
    data, pipe, mesh, _, size, count, _ = sizes
    if pipe > 1 and count < pipe:
        refused["fewer micro-batches than pipeline ranks"] += 1
        return
    if choices.runs_step_once and pipe == 1 and mesh == (1, 1, 1) and count > 1:
        refused["one rank alone runs whole batches in one piece"] += 1
        return
    in_cube = mesh != (1, 1, 1) and count > 1
    gathers = in_cube and facts.of_a_rank(size, mesh, "whole").gathered > 0
    weights: Sequence[CubeWeights] = choices.cube_weights if gathers else ("microbatch",)
    experts: Sequence[Experts] = choices.experts if facts.has_experts and mesh[1] * mesh[2] > 1 else ("whole",)
    by_rows = mesh != (1, 1, 1) and facts.by_rows is not None
    outside = [one for one in choices.cube_outside if by_rows or one != "tokens"] or choices.cube_outside
    for recompute, sharded in product((False, True), (False, True) if data > 1 else (False,)):
        # recomputed blocks keep the backward in one piece
        schedule = ONE_RANK if pipe == 1 else WHOLE if recompute else SPLIT
        may_pair = facts.is_registered and not recompute and not choices.runs_step_once
        pairs = [pairs for pairs in choices.pairs if may_pair or not pairs] if in_cube else [False]
        if not pairs:
            refused["pairs need registered blocks, and no recomputation"] += 1
        for weight, at_once, where, seen in product(weights, pairs, experts, outside):
            if not (at_once and seen == "tokens"):  # user code starts collectives then
                once = choices.runs_step_once
                yield Candidate(*sizes, schedule, recompute, sharded, weight, at_once, once, where, seen)


def _cuts(samples: int, least: int, pipe: int) -> Iterator[tuple[int, int, int]]:
    """The samples of a micro-batch, micro-batches of a batch, and batches."""
    size = least
    while samples % size == 0:
        all_of_them = samples // size
        most = min(MICROBATCHES_PER_RANK * pipe, MOST_MICROBATCHES)
        count = max(number for number in _divisors(all_of_them) if number <= most)
        yield size, count, all_of_them // count
        size *= 2


def _cuts_of(step: BatchesOfStep, least: int) -> Iterator[tuple[int, int, int]]:
    """The same for batches of a given size."""
    for count in _divisors(step.size):
        if count <= MOST_MICROBATCHES and step.size // count % least == 0:
            yield step.size // count, count, step.batches


@cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))
