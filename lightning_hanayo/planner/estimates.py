"""The time and the memory of an optimizer step of a candidate: in closed form, to rank all of them; and simulated.

closed form     A (B work + (P-1) (fill + messages)) + exposed reduction + optimizer      work: of the slowest rank
simulated       the schedule's own table, with the times of its stages, and the micro-batches that it has under way

Both take the times of blocks and pairs from `block_time`. The closed forms of a batch:
hanayo-zb   B (F+I+W) + (P-1) (F / 2W + (1+2W) T_C)                   (tests/planner/test_step_time.py)
hanayo      B (F+T_B) + (P-1) T_B / W + (4W (P-1) + 2 (P-2)) T_C      (docs/reproduction.md)
            + (-B mod P) (1 - 1/W) T_B, as a wave that isn't full keeps ranks as long
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Any

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partition.cut import Load, cut
from lightning_hanayo.planner.block_time import BlockTime, PartTimes, time_block
from lightning_hanayo.planner.candidates import SPLIT, Candidate
from lightning_hanayo.planner.communication_volume import CubeWeights, Experts
from lightning_hanayo.planner.files import Profile
from lightning_hanayo.planner.layout import COSTS, RECOMPUTING, Layout
from lightning_hanayo.planner.machine import Machine
from lightning_hanayo.planner.model_facts import Code, ModelFacts
from lightning_hanayo.schedule import CostModel, simulate
from lightning_hanayo.schedule.table import COMPUTE

_WAITS = 3.0
"""how much longer ranks wait for each other if the largest stage is twice the mean one, fitted to simulated orders"""
_PAIRED = 0.8
"""of the micro-batches beyond one per pipeline rank, the part that runs in pairs, fitted to orders"""
_NOT_HIDDEN = 0.7
"""of the time that a micro-batch travels, the part that bounds a batch if messages are long, fitted to orders"""
_BACKWARD_ACTIONS = 2
"""actions of a backward that is split: each costs the host what a forward does"""


@dataclass(frozen=True)
class Measured:
    """Times of a run without a cube, for one sample, which take the place of counted ones."""

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


@dataclass(frozen=True)
class RankMemory:
    """The bytes that one rank holds when it holds the most, by purpose (docs/guides/memory.md)."""

    weights: float
    """parameters and buffers; in a cube shards"""
    gradients: float
    optimizer: float
    """states, and master weights"""
    activations: float
    """what blocks keep for their backward"""
    gathered: float
    """what a cube has whole while a batch runs: parameters outside the stack, weights gathered once, their gradients"""
    suspended: float
    """what the user's code outside the stack keeps"""
    messages: float
    workspace: float
    """what the running action takes besides"""

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class Estimate:
    """The predicted step of a candidate."""

    candidate: Candidate
    seconds: float
    """of an optimizer step"""
    bubble: float
    """the part of a batch in which ranks wait"""
    of_ranks: tuple[RankMemory, ...]
    """bytes of each pipeline rank; in closed form of the one that needs the most alone"""
    exposed: float = 0.0
    """seconds of the step that wait for sums and gathers over data ranks"""

    @property
    def memory(self) -> RankMemory:
        """Bytes of the rank that needs the most."""
        return max(self.of_ranks, key=lambda one: one.total)


@dataclass(frozen=True)
class _Work:
    """Seconds of one micro-batch."""

    slowest: float
    """of the slowest rank"""
    mean: float
    """of the mean rank"""
    forward: float
    backward: float
    window: float
    """in which reductions are hidden"""
    round_trip: float
    """from its first forward to its last backward"""
    unevenness: float
    """how many times as long ranks wait where some stages have a block more than others"""
    message: float
    gathering_once: float
    """by which a batch takes longer if its weights are gathered once: its first forward, and its last backward"""
    saved_by_a_pair: float
    """by the mean rank, if a forward runs at once with another micro-batch's backward"""


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
        if measured is not None:  # devices that take as long for the counted block
            counted = self._counted((1, 1, 1), 1, "microbatch", "whole")
            speed = counted.alone.total(split=False) / measured.block.total(split=False)
            rates = {
                name: tuple((size, speed * rate) for size, rate in table) for name, table in machine.matmul.items()
            }
            self.machine = replace(machine, matmul=rates, memory_bandwidth=speed * machine.memory_bandwidth)
        self._block_time = cache(self._time_block)
        self._stage = cache(self._time_stage)
        self._work_of = cache(self._count_work)
        self._cut = cache(self._cut_blocks)
        self._blocks_of = cache(self._blocks_of_slowest)
        self.memory = cache(self._closed_form_memory)
        """bytes of a candidate's rank that needs the most, in closed form"""

    def closed_form(self, candidate: Candidate) -> Estimate:
        """The estimate without a simulation."""
        work = self._work(candidate)
        stages, pipe, count = candidate.stages_per_rank, candidate.pipe, candidate.num_microbatches
        waves, batch = candidate.num_waves, count * work.slowest
        if pipe > 1 and candidate.runs_step_once:  # forwards fill the pipeline, and so do backwards
            fills = stages if candidate.schedule == SPLIT else waves
            batch += (pipe - 1) * work.unevenness * (work.forward + work.backward) / fills
            batch += (4 * waves * (pipe - 1) + 2 * (pipe - 2)) * work.message
        elif pipe > 1 and candidate.schedule == SPLIT:
            batch += (pipe - 1) * (work.unevenness * work.forward / stages + (1 + 2 * waves) * work.message)
        elif pipe > 1:
            batch += (pipe - 1) * work.unevenness * work.backward / waves
            batch += (4 * waves * (pipe - 1) + 2 * (pipe - 2)) * work.message
            batch += -count % pipe * (1 - 1 / waves) * work.backward  # a wave that isn't full
        # long messages aren't hidden, as a rank has only so many micro-batches under way
        batch = max(batch, _NOT_HIDDEN * count / pipe * work.round_trip)
        # the last stage to get its gradients hides none of its own reduction
        reduction, window = self._reduction(candidate), work.window
        if candidate.runs_step_once and candidate.schedule == SPLIT:  # no backward of another stage was waited for
            window = count * work.backward * (stages - 1) / stages
        exposed = max(reduction / stages, reduction - window)
        return self._estimate(candidate, batch, count * work.mean, exposed, [self.memory(candidate)])

    def simulated(self, candidate: Candidate) -> Estimate:
        """The estimate from the table that a run has for equal stages; for others it has one that is no slower."""
        sizes = candidate.pipe, candidate.num_waves, candidate.num_microbatches
        order = RECOMPUTING["blocks"] if candidate.recompute else COSTS
        layout = Layout(candidate.schedule, *sizes, costs=order, runs_step_once=candidate.runs_step_once)
        table = layout.table(candidate.num_microbatches)
        blocks = self._cut(table.stage_ranks, once=candidate.runs_step_once)
        reduction = self._reduction(candidate) / candidate.stages_per_rank
        costs = replace(self._costs(candidate, blocks), gradient_reduce=(reduction,) * table.num_stages)
        timeline = simulate(table, costs)
        batch = max(span.end for span in timeline.spans if span.action.kind in COMPUTE) - timeline.begin
        busy, exposed = sum(timeline.busy) / candidate.pipe, timeline.makespan - batch
        sizes_of_stages, ranks = [float(len(one)) for one in blocks], range(candidate.pipe)
        held = [max(held for _, held in timeline.held(rank, sizes_of_stages)) for rank in ranks]
        of_ranks = tuple(sum(len(blocks[stage]) for stage in table.stages_of(rank)) for rank in ranks)
        memory = self._of_ranks(candidate, of_ranks, held)
        return self._estimate(candidate, batch, busy, exposed, memory)

    def _estimate(
        self, candidate: Candidate, batch: float, busy: float, exposed: float, of_ranks: Sequence[RankMemory]
    ) -> Estimate:
        """Add what simulations and closed forms of a batch leave out.

        Args:
            candidate: the layout.
            batch: seconds of a batch whose weights are gathered for each micro-batch, without pairs.
            busy: seconds of it in which the mean rank computes.
            exposed: seconds of its reduction behind the batch.
            of_ranks: the memory of pipeline ranks.
        """
        work, facts = self._work(candidate), self.facts
        paired = candidate.num_microbatches - candidate.pipe
        hidden = candidate.pairs * max(0.0, paired * (1.0 if candidate.pipe == 1 else _PAIRED)) * work.saved_by_a_pair
        batch += work.gathering_once - hidden
        if candidate.runs_step_once:  # while the other ranks wait
            batch += (serial := 3 * candidate.num_microbatches * self._outside(candidate))
            busy += serial / candidate.pipe
        own = self._most_updated(candidate)
        if candidate.shard_optimizer:  # updated parameters are gathered: the first stage waits for its own
            num_bytes = (1 - 1 / candidate.data) * facts.parameter_bytes * own
            link = self.machine.link(candidate.pipe * candidate.cube_size, candidate.data)
            exposed += link.seconds(num_bytes, candidate.stages_per_rank) / candidate.stages_per_rank
        if candidate.cube_size > 1:  # parameters outside of 3-D layers are gathered, and their gradients summed
            whole = facts.of_a_rank(1, candidate.mesh, candidate.experts).whole
            of_block = whole * (facts.parameter_bytes + facts.gradient_bytes)
            first, others = (blocks * of_block for blocks in self._blocks(candidate))
            num_bytes = (1 - 1 / candidate.cube_size) * max(first + self._gathered_outside(candidate), others)
            link = self.machine.link(1, candidate.cube_size)
            exposed += link.seconds(num_bytes, 2) * candidate.accumulate
            if candidate.runs_alike:  # the stack's outputs are gathered, and their gradients reduce-scattered
                is_reduced = candidate.cube_outside == "tokens"  # the embedding's outputs, too, and their gradients
                num_bytes = (2 + 4 * is_reduced) * (1 - 1 / candidate.cube_size) * facts.message * candidate.samples
                each = link.seconds(num_bytes, 2 + 2 * is_reduced)
                exposed += each * candidate.num_microbatches * candidate.accumulate
        # parameters and states are read and written, gradients are read
        each = 2 * facts.parameter_bytes + facts.gradient_bytes + 2 * facts.optimizer_bytes
        updated = own / (candidate.data if candidate.shard_optimizer else 1)
        optimizer = each * updated / self.machine.memory_bandwidth
        seconds = candidate.accumulate * batch + exposed + optimizer
        return Estimate(candidate, seconds, 1 - (busy - hidden) / batch, tuple(of_ranks), exposed)

    # a micro-batch's work

    def _time_block(self, mesh: MeshSizes, samples: int, weights: CubeWeights, experts: Experts) -> BlockTime:
        if self._measured is not None and mesh == (1, 1, 1):
            each = self._measured.block * samples
            return BlockTime(each, each)
        return self._counted(mesh, samples, weights, experts)

    def _counted(self, mesh: MeshSizes, samples: int, weights: CubeWeights, experts: Experts) -> BlockTime:
        """Of the mean block, by its counts."""
        facts, mean = self.facts, BlockTime(PartTimes(), PartTimes())
        for kind, part in facts.kinds:
            one = time_block(kind, mesh, samples, self.machine, facts.dtype, facts.element, weights, experts)
            mean += one * part
        return mean

    def _time_stage(self, block: BlockTime, num_blocks: float, *, recompute: bool) -> PartTimes:
        """Seconds of a stage with so many blocks, and of its actions on the host."""
        time = block.stage(num_blocks)
        if recompute:
            time += PartTimes(backward=time.forward, backward_input=time.forward)
        host = self.machine.host_action
        if self.machine.is_asynchronous:
            return PartTimes(
                max(time.forward, host), max(time.backward, host), max(time.backward_input, host), time.backward_weight
            )
        return time + PartTimes(host, host, host / _BACKWARD_ACTIONS, host / _BACKWARD_ACTIONS)

    def _code(self, candidate: Candidate) -> tuple[Code, Code]:
        """What a rank runs outside the stack for a micro-batch, and `chunked_cross_entropy`."""
        samples, ranks = candidate.samples, candidate.cube_size
        by_rows = self.facts.by_rows if candidate.cube_outside == "tokens" else None
        outside, loss = by_rows or (self.facts.outside, self.facts.loss)
        own = max(1.0, samples / ranks)
        of_samples, of_loss = (samples, samples / ranks) if candidate.runs_alike else (own, own)
        workspace = loss.workspace / (ranks if by_rows else 1)
        return outside * of_samples, replace(loss * of_loss, saved=loss.saved, workspace=workspace)

    def _outside(self, candidate: Candidate) -> float:
        """Seconds of the forward of embedding, head and loss for a micro-batch."""
        seconds = self._seconds(*self._code(candidate))
        if self._measured is not None and (counted := self._seconds(self.facts.outside, self.facts.loss)):
            return self._measured.outside * seconds / counted
        return seconds

    def _seconds(self, outside: Code, loss: Code) -> float:
        """Of the forward of code, a third of forward and backward."""
        machine, flops = self.machine, outside.flops + 4 / 3 * loss.flops  # which the backward repeats
        device = flops / machine.matmul_rate(self.facts.dtype, (flops / 2) ** (1 / 3) if flops else 1.0)
        device += (outside.traffic + loss.traffic) / machine.memory_bandwidth
        host = machine.host_call * (outside.calls + loss.calls)
        return max(device, host) if machine.is_asynchronous else device + host

    def _work(self, candidate: Candidate) -> _Work:
        """Of one micro-batch; candidates that differ in these share it."""
        alike: Any = {"data": 1, "num_microbatches": 1, "accumulate": 1, "shard_optimizer": False, "pairs": False}
        return self._work_of(replace(candidate, **alike))

    def _count_work(self, candidate: Candidate) -> _Work:
        stages, pipe, total = candidate.stages_per_rank, candidate.pipe, len(self.facts.blocks)
        split, outside = candidate.schedule == SPLIT, 0.0 if candidate.runs_step_once else self._outside(candidate)
        blocks = total / (pipe * stages)
        block = self._block_time(candidate.mesh, candidate.samples, candidate.cube_weights, candidate.experts)
        mean, slowest, others = (
            self._stage(block, held, recompute=candidate.recompute) * stages
            for held in (blocks, *(own / stages for own in self._blocks(candidate)))
        )
        share = outside / pipe
        backward = mean.total(split=split) - mean.forward + 2 * share
        # the time in which a rank still computes when the first of its stages has all its gradients
        window = backward * pipe * (stages - 1) / stages
        if split:
            window = mean.backward_weight * pipe * (1.0 if candidate.num_waves > 1 else (stages - 1) / stages)
        hops, message = pipe - 1, 0.0
        if hops:  # the mean over the hops
            within, between, per_node = self._hops(candidate)
            between_nodes = ceil(pipe / per_node) - 1
            message = ((hops - between_nodes) * within + between_nodes * between) / hops
        once = 0.0
        if candidate.cube_weights == "batch":  # in each stage, as the micro-batch goes from one to the next
            each_time = self._block_time(candidate.mesh, candidate.samples, "microbatch", candidate.experts)
            with_gathers, without = (
                self._stage(one, blocks, recompute=False).total(split=split) for one in (each_time, block)
            )
            once = stages * pipe * max(0.0, with_gathers - without)
        backward_input = backward - mean.backward_weight if split else backward
        return _Work(
            slowest=max(slowest.total(split=split) + 3 * outside, others.total(split=split) if pipe > 1 else 0.0),
            mean=mean.total(split=split) + 3 * share,
            forward=mean.forward + share,
            backward=backward,
            window=window,
            round_trip=pipe * (mean.forward + share + backward_input) + 4 * candidate.num_waves * hops * message,
            unevenness=1 + _WAITS * (ceil(blocks) / blocks - 1),
            message=message,
            gathering_once=once,
            saved_by_a_pair=stages * block.saved_by_a_pair(blocks, split=split),
        )

    # messages

    def _hops(self, candidate: Candidate) -> tuple[float, float, int]:
        """Seconds within a node and between nodes, and the pipeline ranks of a node."""
        num_bytes = self.facts.message * candidate.samples / candidate.cube_size
        links = self.machine.within_node, self.machine.between_nodes
        per_node = max(1, self.machine.ranks_per_node // candidate.cube_size)
        within, between = (link.seconds(num_bytes) for link in links)
        return within, between, per_node

    def _reduction(self, candidate: Candidate) -> float:
        """Seconds in which the slowest rank's gradients are summed over the data ranks."""
        if candidate.data == 1:
            return 0.0
        passes = 1 if candidate.shard_optimizer else 2
        num_bytes = passes * (1 - 1 / candidate.data) * self.facts.gradient_bytes * self._most_updated(candidate)
        link = self.machine.link(candidate.pipe * candidate.cube_size, candidate.data)
        return link.seconds(num_bytes, candidate.stages_per_rank)

    # simulation

    def _cut_blocks(self, stage_ranks: tuple[int, ...], *, once: bool) -> list[range]:
        """The blocks of each stage."""
        facts, sizes = self.facts, [float(block.parameters) for block in self.facts.blocks]
        outside = 0 if once else facts.computing_parameters, facts.outside_parameters
        loads = [Load(sizes, one) for one in outside]
        return cut(loads, stage_ranks) if len(stage_ranks) > 1 else [range(len(facts.blocks))]

    def _costs(self, candidate: Candidate, stages: Sequence[range]) -> CostModel:
        """Seconds of each stage, which has these blocks."""
        facts, outside = self.facts, 0.0 if candidate.runs_step_once else self._outside(candidate)
        mean = facts.mean(lambda block: block.flops)
        works = [block.flops / mean if mean else 1.0 for block in facts.blocks]
        time = self._block_time(candidate.mesh, candidate.samples, candidate.cube_weights, candidate.experts)
        works_of_stages = [sum(works[block] for block in blocks) for blocks in stages]
        times = [self._stage(time, work, recompute=candidate.recompute) for work in works_of_stages]
        times[-1] += PartTimes(outside, 2 * outside, 2 * outside, 0.0)
        split = candidate.schedule == SPLIT
        within, between, per_node = self._hops(candidate)
        by_node = candidate.pipe > per_node
        return CostModel(
            forward=tuple(one.forward for one in times),
            backward_input=tuple(one.backward_input if split else one.backward for one in times),
            backward_weight=tuple(one.backward_weight if split else 0.0 for one in times),
            message=within if candidate.pipe > 1 else 0.0,
            message_between_nodes=between if by_node else None,
            ranks_per_node=per_node if by_node else None,
        )

    # parameters and memory of ranks

    def _blocks(self, candidate: Candidate) -> tuple[int, int]:
        """Blocks of rank 0, and the most of the others."""
        return self._blocks_of(candidate.pipe, candidate.stages_per_rank, once=candidate.runs_step_once)

    def _blocks_of_slowest(self, pipe: int, stages: int, *, once: bool) -> tuple[int, int]:
        """The same, as `partition.cut` shares them."""
        facts, total = self.facts, len(self.facts.blocks)
        if pipe == 1:
            return total, 0
        of_outside = 0 if once else facts.computing_parameters, facts.outside_parameters
        of_block = max(1.0, facts.mean(lambda block: block.parameters))
        outside = [one / of_block for one in of_outside]  # in blocks

        def largest(own: int, others: int) -> float:
            return max(max(own + one, others) / (total + one) for one in outside)

        choices = [(own, ceil((total - own) / (pipe - 1))) for own in range(stages, total // pipe + 1)]
        return min(choices, key=lambda one: (largest(*one), -one[0]))

    def _most_updated(self, candidate: Candidate) -> float:
        """Elements of the rank that trains the most."""
        each = self.facts.of_a_rank(1, candidate.mesh, candidate.experts).updated
        first, others = (blocks * each for blocks in self._blocks(candidate))
        return max(first + self.facts.outside_trained / candidate.cube_size, others)

    def _gathered_outside(self, candidate: Candidate) -> float:
        """Bytes outside the stack that it gathers."""
        facts = self.facts
        sharded = (candidate.cube_outside == "tokens") * (facts.vocabulary_bytes + facts.vocabulary_gradients)
        gradients = facts.outside_trained * facts.gradient_bytes
        return (candidate.cube_size > 1) * (facts.outside_parameters * facts.parameter_bytes + gradients - sharded)

    def _closed_form_memory(self, candidate: Candidate) -> RankMemory:
        """Of the rank that needs the most, which holds as many micro-batches as the layout has under way."""
        blocks = self._blocks(candidate)[: candidate.pipe]  # one pipeline rank has no others
        ranks = self._of_ranks(candidate, blocks, [_under_way(candidate) * own for own in blocks])
        return max(ranks, key=lambda one: one.total)

    def _of_ranks(self, candidate: Candidate, blocks: Sequence[int], held: Sequence[float]) -> list[RankMemory]:
        """Of pipeline ranks, the first of which holds the parameters outside the stack, too.

        Args:
            candidate: the layout.
            blocks: of each rank.
            held: for each, of how many blocks it holds activations at most, without pairs.
        """
        once, count = candidate.runs_step_once, candidate.num_microbatches
        more = candidate.pairs * (count > _under_way(candidate))  # an order of pairs may have one more under way
        facts, samples, ranks = self.facts, candidate.samples, candidate.cube_size
        block = facts.of_a_rank(samples, candidate.mesh, candidate.experts)
        cast = facts.element * (facts.element < facts.parameter_bytes) * block.cast  # under autocast
        # layers whose backward is split keep one copy for all micro-batches
        has_frozen = any(block.frozen for block, _ in facts.kinds)
        shares_cast = candidate.pipe > 1 and candidate.schedule == SPLIT and ranks == 1 and not has_frozen
        by_batch, accumulates = candidate.cube_weights == "batch", candidate.accumulate > 1
        saved = (block.saved_by_batch if by_batch else block.saved) + cast * (not shares_cast)
        message, (outside, loss) = facts.message * samples / ranks, self._code(candidate)
        if once:
            outside *= count
        has_messages, in_cube, x = candidate.pipe > 1, ranks > 1, candidate.mesh[0]
        kept, kept_shards = (block.gathered, block.gathered_shards) if by_batch else (0.0, 0.0)
        before_stack = message * (ranks if candidate.runs_alike else 1)  # of each micro-batch under way
        # sums over x that are under way: of a block's last two weights, and of each stage's first two until later
        sums = block.first_sums, block.last_sums
        late, early = (in_cube * (not by_batch) * facts.element * one for one in sums)
        ahead = (x > 1) * late / (1 + 1 / x)  # two weights of the next block that is recomputed
        workspace = early + (saved + ahead if candidate.recompute else 2 * message)
        # shards of the gradients of parameters that are whole while a batch runs are those of earlier batches
        of_outside = facts.gradient_bytes * facts.outside_trained
        of_outside *= accumulates or not in_cube
        in_dry_run = 0.0
        if candidate.cube_outside == "tokens":
            of_outside += facts.vocabulary_gradients
            in_dry_run = in_cube * facts.outside_parameters * facts.parameter_bytes  # of values, which are whole there

        def memory(own: int, held: float, *, has_outside: bool) -> RankMemory:
            """Of a rank that holds so many blocks, and the activations of as many as are `held`."""
            parameters = own * block.parameters + has_outside * facts.outside_parameters / ranks
            trained = own * block.trained - (not accumulates) * own * kept_shards
            updated = own * block.updated + has_outside * facts.outside_trained / ranks
            # parameters outside the stack, and weights that are gathered for the batch, with their gradients
            gathered = has_outside * self._gathered_outside(candidate)
            gathered += own * ((facts.element + facts.gradient_bytes) * kept + cast * shares_cast)
            activations = held * (message if candidate.recompute else saved)
            under_way = held / max(1.0, own) if has_messages else float(in_cube)  # micro-batches
            suspended = outside.saved + loss.saved + under_way * before_stack
            messages = 2 * candidate.stages_per_rank * message * has_messages
            taken = max(workspace, has_outside * max(outside.workspace, loss.workspace)) * (1 + candidate.pairs)
            taken += has_messages * candidate.stages_per_rank * late
            of_batch = activations + has_outside * suspended + messages + taken
            return RankMemory(
                weights=parameters * facts.parameter_bytes,
                gradients=trained * facts.gradient_bytes + has_outside * of_outside / ranks,
                optimizer=updated * facts.optimizer_bytes / (candidate.data if candidate.shard_optimizer else 1),
                activations=activations,
                gathered=max(gathered, has_outside * in_dry_run - of_batch),
                suspended=has_outside * suspended,
                messages=messages,
                workspace=taken,
            )

        of_each = enumerate(zip(blocks, held, strict=True))
        return [memory(own, one + more * own, has_outside=rank == 0) for rank, (own, one) in of_each]


def _under_way(candidate: Candidate) -> int:
    """Micro-batches at one time: as many as there are pipeline ranks, or all if the step runs once."""
    count = candidate.num_microbatches
    return count if candidate.runs_step_once else min(count, candidate.pipe)
