"""The bytes that ranks of a layout hold: in closed form for the fullest one, and as a model of each stage's.

Blocks count with their mean. The closed form has as many micro-batches under way as pipeline ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from lightning_hanayo.planner.candidates import Candidate
from lightning_hanayo.planner.model_facts import ModelFacts
from lightning_hanayo.schedule import MemoryModel, RankMemory


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
