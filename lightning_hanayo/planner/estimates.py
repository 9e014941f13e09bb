"""The time and the memory of an optimizer step of a candidate: in closed form, to rank all of them; and simulated.

closed form     A (B work + (P-1) (fill + messages)) + exposed reduction + optimizer      work: of the slowest rank
simulated       the schedule's own table, with the times of its stages, and the bytes of MemoryModel

Both take the times of blocks from `block_time`, and the schedules' rules from `schedule`. The closed forms of a batch:
hanayo-zb   B (F+I+W) + (P-1) (F / 2W + (1+2W) T_C)                   (tests/planner/test_step_time.py)
hanayo      B (F+T_B) + (P-1) T_B / W + (4W (P-1) + 2 (P-2)) T_C      (docs/reproduction.md)
            + (-B mod P) (1 - 1/W) T_B, as a wave that isn't full keeps ranks as long

Costs of a schedule whose ranks run two actions at once, as the machine runs them.

Processes on CPUs plan the order of collectives. On GPUs both actions put their work into one stream, and take turns.

Times that a run has measured, which take the place of counted ones.

The bytes that ranks of a layout hold: in closed form for the fullest one, and as a model of each stage's.

Blocks count with their mean. The closed form has as many micro-batches under way as pipeline ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import ceil
from typing import ClassVar

from typing_extensions import override

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.overlap.pair_time import Segment, best_order, run_alone, run_by_turns
from lightning_hanayo.partition.cut import Load, cut
from lightning_hanayo.planner.block_time import BlockTime, PartTimes, segments, time_block
from lightning_hanayo.planner.candidates import SPLIT, Candidate
from lightning_hanayo.planner.communication_volume import CubeWeights
from lightning_hanayo.planner.files import Profile
from lightning_hanayo.planner.layout import COSTS, PAIR_SEGMENTS, RECOMPUTING, Layout
from lightning_hanayo.planner.machine import Link, Machine
from lightning_hanayo.planner.model_facts import ModelFacts
from lightning_hanayo.schedule import Action, CostModel, MemoryModel, RankMemory, simulate
from lightning_hanayo.schedule.table import COMPUTE, Table

_OVERHEAD = 1.03
"""what a pair takes of what is simulated: measured 0.99 to 1.04, once 1.07 (docs/benchmarks/pairs.md)"""
_TRIES = 20
"""orders of collectives that are tried, in each of many layouts: a run tries tens of thousands, and takes up to 8 %
less than predicted (mesh 4,2,1 of the benchmark)"""


@dataclass(frozen=True)
class PairCosts(CostModel):
    """Costs whose pairs run in the best order of collectives."""

    takes_turns: ClassVar[bool] = False

    @override
    def pair(self, table: Table, first: Action, second: Action) -> tuple[float, float]:
        return pair_ends(self.segments_of(table, first), self.segments_of(table, second), self.takes_turns)


@dataclass(frozen=True)
class TurnCosts(PairCosts):
    """Costs whose pairs take turns."""

    takes_turns: ClassVar[bool] = True


@lru_cache(maxsize=10_000)
def pair_ends(first: tuple[Segment, ...], second: tuple[Segment, ...], takes_turns: bool, /) -> tuple[float, float]:
    """Seconds until each of two actions has ended that begin at once."""
    run = run_by_turns(first, second) if takes_turns else best_order(first, second, _TRIES)
    return _OVERHEAD * run.ends[0], _OVERHEAD * run.ends[1]


@dataclass(frozen=True)
class Measured:
    """Times of a run without a cube, for one sample."""

    block: PartTimes
    outside: float
    """the forward of what isn't in the stack"""

    @classmethod
    def of(cls, profile: Profile, samples: float) -> "Measured":
        """Of a run's profile, whose micro-batches had so many samples. The last stage has head and loss, too.

        Raises:
            HanayoError: the profile hasn't the times of each stage, or they are 0.
        """
        costs, blocks = profile.costs, profile.blocks
        values = (costs.forward, costs.backward_input, costs.backward_weight)
        times = [one for one in values if isinstance(one, tuple) and len(one) == len(blocks)]
        if len(times) != len(values) or not all(blocks):
            raise HanayoError("the profile has no time of each stage, or a stage without blocks; measure once more")
        inner = max(1, len(blocks) - 1)
        each = [sum(one[:inner]) / (samples * sum(blocks[:inner])) for one in times]
        if not sum(each):
            raise HanayoError("the profile's stages take no time; measure once more")
        last = sum(one[-1] for one in times) / samples - blocks[-1] * sum(each)
        return cls(PartTimes(each[0], each[1] + each[2], each[1], each[2]), max(0.0, last) / 3)


_WAITS = 3.0
"""how much longer ranks wait for each other if the largest stage is twice the mean one, fitted to simulated orders"""
_PAIRED = 0.9
"""of the micro-batches beyond one per pipeline rank, the part that runs in pairs"""
_BACKWARD_ACTIONS = 2
"""actions of a backward that is split: each costs the host what a forward does"""


AllSegments = dict[str, tuple[Segment, ...]]
"""by kind of action"""


@dataclass(frozen=True)
class Estimate:
    """What the planner says of a candidate."""

    candidate: Candidate
    seconds: float
    """of an optimizer step"""
    bubble: float
    """the part of a batch in which ranks wait"""
    memory: RankMemory
    """bytes of the rank that needs the most"""
    exposed: float = 0.0
    """seconds of the step that wait for sums and gathers over data ranks"""
    optimizer: float = 0.0
    """seconds of the optimizer's step"""


class StepModel:
    """Estimates the steps of one model on one machine.

    Args:
        facts: the model.
        machine: the rates.
        measured: what blocks took in a run, in place of what is counted; in a cube counted times are scaled by it.
    """

    def __init__(self, facts: ModelFacts, machine: Machine, measured: Measured | None = None) -> None:
        self.facts = facts
        self.machine = machine
        self._measured = measured
        if measured is not None:
            counted = self._counted((1, 1, 1), 1)
            self.machine = _scaled(machine, _sum(counted.alone, False) / _sum(measured.block, False))
        self._block_time = cache(self._time_block)
        self._bytes = StepBytes(facts)
        self._stages = cache(self._cut)
        self._segments = cache(self._segments_of)
        self._pairs = cache(self._pair_part)

    def closed_form(self, candidate: Candidate) -> Estimate:
        """The estimate without a simulation."""
        work = self._work(candidate)
        stages, pipe, count = candidate.stages_per_rank, candidate.pipe, candidate.num_microbatches
        batch = count * work.slowest
        waves, hop = candidate.num_waves, self._message(candidate)
        if pipe > 1 and candidate.schedule == SPLIT:
            batch += (pipe - 1) * (self._unevenness(candidate) * work.forward / stages + (1 + 2 * waves) * hop)
        elif pipe > 1:
            batch += (pipe - 1) * self._unevenness(candidate) * work.backward / waves
            batch += (4 * waves * (pipe - 1) + 2 * (pipe - 2)) * hop
            batch += -count % pipe * (1 - 1 / waves) * work.backward
        batch += self._gathering_once(candidate) - _num_pairs(candidate) * self.saved_by_a_pair(candidate)
        reduction = self._reduction(candidate)
        exposed = max(reduction / stages, reduction - _window(candidate, work)) + self._gather(candidate) / stages
        busy = count * work.mean
        return self._estimate(candidate, batch, 1 - busy / batch, self._bytes.in_closed_form(candidate), exposed)

    def _unevenness(self, candidate: Candidate) -> float:
        """By how much longer ranks wait where some stages have a block more than others; 1 where all are equal."""
        mean = len(self.facts.blocks) / (candidate.pipe * candidate.stages_per_rank)
        return 1 + _WAITS * (ceil(mean) / mean - 1)

    def simulated(self, candidate: Candidate) -> Estimate:
        """The estimate from the table that a run has for equal stages; for others it has one that is no slower."""
        layout, stages = self._layout(candidate), candidate.stages_per_rank
        reduction = self._reduction(candidate) / stages
        costs = replace(self._costs(candidate), gradient_reduce=(reduction,) * layout.num_stages)
        timeline = simulate(layout.table(candidate.num_microbatches), costs)
        batch = max(span.end for span in timeline.spans if span.action.kind in COMPUTE) - timeline.begin
        exposed = timeline.makespan - batch + self._gather(candidate) / stages
        batch += self._gathering_once(candidate)
        bubble = 1 - sum(timeline.busy) / (batch * candidate.pipe)
        memory = max(self._bytes.model(candidate, self._stages(candidate)).peaks(timeline), key=lambda one: one.total)
        return self._estimate(candidate, batch, bubble, memory, exposed)

    def _estimate(
        self, candidate: Candidate, batch: float, bubble: float, memory: RankMemory, exposed: float
    ) -> Estimate:
        optimizer = self._optimizer(candidate)
        exposed += self._outside_gather(candidate) * candidate.accumulate
        seconds = candidate.accumulate * batch + exposed + optimizer
        return Estimate(candidate, seconds, bubble, memory, exposed, optimizer)

    # a micro-batch's work

    def _time_block(self, mesh: MeshSizes, samples: int, weights: CubeWeights) -> BlockTime:
        if self._measured is not None and mesh == (1, 1, 1):
            each = self._measured.block * samples
            return BlockTime(each, each)
        return self._counted(mesh, samples, weights)

    def _counted(self, mesh: MeshSizes, samples: int, weights: CubeWeights = "microbatch") -> BlockTime:
        """Of the mean block, by its counts."""
        facts = self.facts
        alone = further = PartTimes()
        for kind, part in facts.kinds:
            time = time_block(
                kind, mesh, samples, self.machine, dtype=facts.dtype, element=facts.element, weights=weights
            )
            alone, further = alone + time.alone * part, further + time.further * part
        return BlockTime(alone, further)

    def _stage(self, candidate: Candidate, num_blocks: float) -> PartTimes:
        """Seconds of a stage with so many blocks, and of its actions on the host."""
        time = self._block_time(candidate.mesh, candidate.samples, candidate.cube_weights).stage(num_blocks)
        if candidate.recompute:
            time += PartTimes(backward=time.forward, backward_input=time.forward)
        host = self.machine.host_action
        if self.machine.is_asynchronous:
            return PartTimes(
                max(time.forward, host), max(time.backward, host), max(time.backward_input, host), time.backward_weight
            )
        return time + PartTimes(host, host, host / _BACKWARD_ACTIONS, host / _BACKWARD_ACTIONS)

    def _gathering_once(self, candidate: Candidate) -> float:
        """Seconds by which the first forward and the last backward take longer, if weights are gathered once a batch:
        in each stage, as the micro-batch goes from one to the next."""
        if candidate.cube_weights == "microbatch":
            return 0.0
        stages, split = candidate.pipe * candidate.stages_per_rank, candidate.schedule == SPLIT
        with_it, without = (
            self._stage(replace(candidate, cube_weights=weights, recompute=False), len(self.facts.blocks) / stages)
            for weights in ("microbatch", "batch")
        )
        return stages * max(0.0, _sum(with_it, split) - _sum(without, split))

    # two micro-batches at once

    def _segments_of(self, mesh: MeshSizes, samples: int, weights: CubeWeights, num_blocks: int) -> AllSegments:
        """When a typical stage of so many blocks computes and communicates, by kind of action."""
        facts = self.facts
        block, _ = max(facts.kinds, key=lambda kind: kind[1])
        made = segments(block, mesh, samples, self.machine, facts.dtype, facts.element, weights, num_blocks)
        return {kind: parts for kind, parts in made.items() if run_alone(parts) > 0}

    def _pair_part(self, mesh: MeshSizes, samples: int, weights: CubeWeights, num_blocks: int, *, split: bool) -> float:
        """What a forward and a backward take at once, as a part of what they take one after the other."""
        found = self._segments(mesh, samples, weights, num_blocks)
        backward = "I" if split else "B"
        if not {"F", backward} <= set(found):
            return 1.0
        ends = pair_ends(found["F"], found[backward], self.machine.is_asynchronous)
        return min(1.0, max(ends) / (run_alone(found["F"]) + run_alone(found[backward])))

    def saved_by_a_pair(self, candidate: Candidate) -> float:
        """Seconds that the mean rank saves for a micro-batch whose forward runs at once with another one's backward."""
        if not candidate.pairs:
            return 0.0
        split, stages = candidate.schedule == SPLIT, candidate.stages_per_rank
        stage = self._stage(candidate, len(self.facts.blocks) / (candidate.pipe * stages))
        both = stage.forward + (stage.backward_input if split else stage.backward)
        part = self._pairs(*_cube_of(candidate), self._typical_blocks(candidate), split=split)
        return stages * both * (1 - part)

    def _typical_blocks(self, candidate: Candidate) -> int:
        """Blocks of the stage whose segments are taken: with more the pattern repeats."""
        return min(2, max(1, round(len(self.facts.blocks) / (candidate.pipe * candidate.stages_per_rank))))

    # outside the stack

    def _outside(self, candidate: Candidate) -> float:
        """Seconds of the forward of embedding, head and loss: each rank of a cube has its part of the samples."""
        facts, machine = self.facts, self.machine
        samples = max(1.0, candidate.samples / candidate.cube_size)
        if self._measured is not None:
            return samples * self._measured.outside
        flops = samples * facts.outside_flops
        device = flops / machine.matmul_rate(facts.dtype, (flops / 2) ** (1 / 3) if flops else 1.0)
        device += samples * facts.outside_traffic / machine.memory_bandwidth
        host = machine.host_call * facts.outside_calls
        return max(device, host) if machine.is_asynchronous else device + host

    def _work(self, candidate: Candidate) -> "_Work":
        """Seconds of one micro-batch on the ranks."""
        stages, pipe, total = candidate.stages_per_rank, candidate.pipe, len(self.facts.blocks)
        split, outside = candidate.schedule == SPLIT, self._outside(candidate)
        mean = self._stage(candidate, total / (pipe * stages)) * stages
        whole = _sum(mean, split)
        own, others = self._bytes.blocks(candidate)
        slowest = max(
            _sum(self._stage(candidate, own / stages) * stages, split) + 3 * outside,
            _sum(self._stage(candidate, others / stages) * stages, split) if pipe > 1 else 0.0,
        )
        share = outside / pipe
        backward = (mean.backward_input + mean.backward_weight if split else mean.backward) + 2 * share
        return _Work(slowest, whole + 3 * share, mean.forward + share, backward, mean.backward_weight)

    # messages

    def _message(self, candidate: Candidate) -> float:
        """Seconds of a message to the next pipeline rank: the mean over the hops."""
        hops = candidate.pipe - 1
        if not hops:
            return 0.0
        within, between, per_node = self._hops(candidate)
        between_nodes = ceil(candidate.pipe / per_node) - 1
        return ((hops - between_nodes) * within + between_nodes * between) / hops

    def _hops(self, candidate: Candidate) -> tuple[float, float, int]:
        """Seconds within a node and between nodes, and the pipeline ranks of a node."""
        num_bytes = self.facts.message * candidate.samples / candidate.cube_size
        links = self.machine.within_node, self.machine.between_nodes
        per_node = max(1, self.machine.ranks_per_node // candidate.cube_size)
        within, between = (link.seconds(num_bytes) for link in links)
        return within, between, per_node

    def _data_link(self, candidate: Candidate) -> Link:
        return self.machine.link(0, candidate.pipe * candidate.cube_size, candidate.data)

    def _reduction(self, candidate: Candidate) -> float:
        """Seconds in which the slowest rank's gradients are summed over the data ranks."""
        if candidate.data == 1:
            return 0.0
        others = 1 - 1 / candidate.data
        passes = 1 if candidate.shard_optimizer else 2
        num_bytes = passes * others * self.facts.gradient_bytes * self._bytes.trained(candidate)
        return self._data_link(candidate).seconds(num_bytes, messages=candidate.stages_per_rank)

    def _gather(self, candidate: Candidate) -> float:
        """Seconds in which updated parameters are gathered, where each data rank updates its own rows."""
        if not candidate.shard_optimizer:
            return 0.0
        num_bytes = (1 - 1 / candidate.data) * self.facts.parameter_bytes * self._bytes.trained(candidate)
        return self._data_link(candidate).seconds(num_bytes, messages=candidate.stages_per_rank)

    def _outside_gather(self, candidate: Candidate) -> float:
        """Seconds in which a cube gathers the parameters outside the stack for a batch, and sums their gradients."""
        if candidate.cube_size == 1:
            return 0.0
        facts, others = self.facts, 1 - 1 / candidate.cube_size
        link = self.machine.link(0, 1, candidate.cube_size)
        return link.seconds(others * facts.outside_bytes, messages=2)

    def _optimizer(self, candidate: Candidate) -> float:
        """Seconds in which it reads and writes values, gradients and states."""
        facts = self.facts
        each = 2 * facts.parameter_bytes + facts.gradient_bytes + 2 * facts.optimizer_bytes
        own = self._bytes.trained(candidate) / (candidate.data if candidate.shard_optimizer else 1)
        return each * own / self.machine.memory_bandwidth

    # simulation

    def _layout(self, candidate: Candidate) -> Layout:
        costs = RECOMPUTING["blocks"] if candidate.recompute else COSTS
        if candidate.pairs:
            costs = replace(costs, segments=PAIR_SEGMENTS)
        sizes = candidate.pipe, candidate.num_waves, candidate.num_microbatches
        return Layout(candidate.schedule, *sizes, costs=costs, pairs=candidate.pairs)

    def _cut(self, candidate: Candidate) -> list[range]:
        layout, facts = self._layout(candidate), self.facts
        if candidate.pipe == 1:
            return [range(len(facts.blocks))]
        sizes = [float(block.parameters) for block in facts.blocks]
        loads = [Load(sizes, outside) for outside in (facts.computing_parameters, facts.outside_parameters)]
        return cut(loads, layout.table(candidate.num_microbatches).stage_ranks)

    @cached_property
    def _sizes(self) -> list[float]:
        """Each block's work, in that of the mean block."""
        mean = self.facts.mean(lambda block: block.flops)
        return [block.flops / mean if mean else 1.0 for block in self.facts.blocks]

    def _costs(self, candidate: Candidate) -> CostModel:
        """Seconds of each stage."""
        outside = self._outside(candidate)
        stages = self._stages(candidate)
        times = [self._stage(candidate, sum(self._sizes[block] for block in blocks)) for blocks in stages]
        times[-1] += PartTimes(outside, 2 * outside, 2 * outside, 0.0)
        split = candidate.schedule == SPLIT
        within, between, per_node = self._hops(candidate)
        by_node = candidate.pipe > per_node
        found = self._segments(*_cube_of(candidate), self._typical_blocks(candidate)) if candidate.pairs else {}
        model = TurnCosts if self.machine.is_asynchronous else PairCosts
        return model(
            forward=tuple(one.forward for one in times),
            backward_input=tuple(one.backward_input if split else one.backward for one in times),
            backward_weight=tuple(one.backward_weight if split else 0.0 for one in times),
            message=within if candidate.pipe > 1 else 0.0,
            message_between_nodes=between if by_node else None,
            ranks_per_node=per_node if by_node else None,
            segments=tuple(found.items()),
        )


@dataclass(frozen=True)
class _Work:
    """Seconds of one micro-batch: of the slowest rank, of the mean one, and the parts of the mean one."""

    slowest: float
    mean: float
    forward: float
    backward: float
    weight: float


def _scaled(machine: Machine, speed: float) -> Machine:
    """The machine with devices that are so many times as fast."""
    rates = {dtype: tuple((size, speed * rate) for size, rate in table) for dtype, table in machine.matmul.items()}
    return replace(machine, matmul=rates, memory_bandwidth=speed * machine.memory_bandwidth)


def _sum(time: PartTimes, split: bool) -> float:
    return time.forward + (time.backward_input + time.backward_weight if split else time.backward)


def _cube_of(candidate: Candidate) -> tuple[MeshSizes, int, CubeWeights]:
    """What the times of a block depend on."""
    return candidate.mesh, candidate.samples, candidate.cube_weights


def _num_pairs(candidate: Candidate) -> float:
    """Micro-batches of which a rank runs the forward at once with the backward of another one: fitted to orders."""
    others = candidate.num_microbatches - candidate.pipe
    return max(0.0, others * (1.0 if candidate.pipe == 1 else _PAIRED))


def _window(candidate: Candidate, work: _Work) -> float:
    """Seconds in which a rank still computes when the first of its stages has all its gradients."""
    pipe, stages = candidate.pipe, candidate.stages_per_rank
    if candidate.schedule != SPLIT:
        return work.backward * pipe * (stages - 1) / stages
    return work.weight * pipe * (1.0 if candidate.num_waves > 1 else (stages - 1) / stages)


class StepBytes:
    """Counts what ranks hold of one model."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._rank_blocks = cache(_blocks_of_slowest)
        self._saved = cache(
            lambda mesh, samples, weights: facts.mean(
                lambda one: one.saved_by_a_rank(samples, mesh, facts.element, weights=weights)
            )
        )
        self._gathered = cache(lambda mesh, samples: facts.mean(lambda one: one.gathered_by_a_rank(samples, mesh)))
        self._parameters_of_block = cache(lambda mesh: facts.mean(lambda one: one.parameters_of_a_rank(mesh)))
        self._trained_of_block = cache(lambda mesh: facts.mean(lambda one: one.trained_by_a_rank(mesh)))

    def trained(self, candidate: Candidate) -> float:
        """Elements of the rank that trains the most."""
        own, others = self.blocks(candidate)
        return max(self._held(candidate, own, has_outside=True)[1], self._held(candidate, others, has_outside=False)[1])

    def _held(self, candidate: Candidate, blocks: float, *, has_outside: bool) -> tuple[float, float]:
        """Elements of a rank with so many blocks, and those of them that it trains."""
        facts, mesh = self._facts, candidate.mesh
        own, trained = blocks * self._parameters_of_block(mesh), blocks * self._trained_of_block(mesh)
        if not has_outside:
            return own, trained
        outside, frozen = facts.outside_parameters, facts.outside_frozen
        return own + outside / candidate.cube_size, trained + (outside - frozen) / candidate.cube_size

    def blocks(self, candidate: Candidate) -> tuple[int, int]:
        """Blocks of pipeline rank 0, and the most of the others, as the strategy cuts them: by parameters."""
        facts = self._facts
        outside = tuple(
            one / max(1.0, facts.mean(lambda block: block.parameters))
            for one in (facts.computing_parameters, facts.outside_parameters)
        )
        return self._rank_blocks(len(facts.blocks), candidate.pipe, candidate.stages_per_rank, outside)

    def in_closed_form(self, candidate: Candidate) -> RankMemory:
        """Of the rank that needs the most."""
        own, others = self.blocks(candidate)
        more = candidate.pairs / candidate.stages_per_rank
        peak = min(candidate.num_microbatches, candidate.pipe + more)
        first = self._rank_memory(candidate, own, peak, has_outside=True)
        return max(first, self._rank_memory(candidate, others, peak, has_outside=False), key=lambda one: one.total)

    def _rank_memory(self, candidate: Candidate, blocks: float, peak: float, *, has_outside: bool) -> RankMemory:
        facts, part = self._facts, self._stage_bytes(candidate)
        own, trained = self._held(candidate, blocks, has_outside=has_outside)
        return RankMemory(
            weights=own * facts.parameter_bytes,
            gradients=trained * facts.gradient_bytes,
            optimizer=trained * facts.optimizer_bytes / (candidate.data if candidate.shard_optimizer else 1),
            activations=peak * blocks * part.activation,
            gathered=has_outside * part.gathered + blocks * part.kept,
            suspended=has_outside * (part.suspended + peak * part.message * (candidate.pipe > 1)),
            messages=2 * candidate.stages_per_rank * part.message * (candidate.pipe > 1),
            workspace=(1 + candidate.pairs) * max(part.workspace, has_outside * part.outside_workspace),
        )

    def _stage_bytes(self, candidate: Candidate) -> "_Bytes":
        """What is held of one micro-batch, or all the time besides parameters."""
        facts, samples, ranks = self._facts, candidate.samples, candidate.cube_size
        saved = self._saved(candidate.mesh, samples, candidate.cube_weights)
        kept = self._gathered(candidate.mesh, samples) if candidate.cube_weights == "batch" else 0.0
        message = facts.message * samples / ranks
        share = max(1.0, samples / ranks)
        return _Bytes(
            activation=message if candidate.recompute else saved,
            workspace=saved if candidate.recompute else 2 * message,
            outside_workspace=2 * facts.largest_outside * share,
            message=message,
            suspended=facts.outside_saved * share,
            gathered=facts.outside_bytes if ranks > 1 else 0.0,
            kept=(facts.element + facts.gradient_bytes) * kept,
        )

    def model(self, candidate: Candidate, stages: Sequence[range]) -> MemoryModel:
        """What each stage holds; `stages` are its blocks."""
        facts, part = self._facts, self._stage_bytes(candidate)
        held, trained = zip(
            *(self._held(candidate, len(blocks), has_outside=not number) for number, blocks in enumerate(stages)),
            strict=True,
        )
        first, last = [1.0] + [0.0] * (len(stages) - 1), [0.0] * (len(stages) - 1) + [1.0]
        shard = candidate.data if candidate.shard_optimizer else 1
        has_messages = candidate.pipe > 1
        return MemoryModel(
            activation=tuple(len(blocks) * part.activation for blocks in stages),
            weights=tuple(one * facts.parameter_bytes for one in held),
            gradients=tuple(one * facts.gradient_bytes for one in trained),
            optimizer=tuple(one * facts.optimizer_bytes / shard for one in trained),
            gathered=tuple(
                one * part.gathered + len(blocks) * part.kept for one, blocks in zip(first, stages, strict=True)
            ),
            suspended=tuple(
                a * part.message * has_messages + b * part.suspended for a, b in zip(first, last, strict=True)
            ),
            message=part.message * has_messages,
            send_buffers=part.message * has_messages,
            forward_workspace=part.workspace,
            backward_workspace=tuple(max(part.workspace, one * part.outside_workspace) for one in last),
            weight_workspace=part.workspace,
        )


@dataclass(frozen=True)
class _Bytes:
    activation: float
    """of one block"""
    workspace: float
    outside_workspace: float
    message: float
    suspended: float
    gathered: float
    kept: float
    """for the batch, of one block: gathered weights and their gradients"""


def _blocks_of_slowest(total: int, pipe: int, stages: int, outside: tuple[float, ...]) -> tuple[int, int]:
    """Blocks of rank 0, and the most of the others, as `partition.cut` shares them; `outside` are in blocks."""
    if pipe == 1:
        return total, 0

    def largest(own: int, others: int) -> float:
        return max(max(own + one, others) / (total + one) for one in outside)

    choices = [(own, ceil((total - own) / (pipe - 1))) for own in range(stages, total // pipe + 1)]
    return min(choices, key=lambda one: (largest(*one), -one[0]))
