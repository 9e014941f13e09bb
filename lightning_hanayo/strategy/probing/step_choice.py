"""Decides for each batch, on pipeline rank 0, how often the step runs: once, or once for each micro-batch.

                      training                                   validation, test
step="microbatch"     for each micro-batch                       for each micro-batch
step="auto"           for each, where a probe finds a rule       once, if it fits in memory
                      that puts losses and logs together;
                      else once, if it fits in memory
step="batch"          once                                       once
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from lightning_hanayo.pipeline_parallel.batches.microbatches import PieceSizes
from lightning_hanayo.pipeline_parallel.batches.plan import BatchSource
from lightning_hanayo.pipeline_parallel.comm.object_collectives import all_gather_objects
from lightning_hanayo.strategy.batch_split import SplitBatch
from lightning_hanayo.strategy.losses.loss_watch import LossWatch
from lightning_hanayo.strategy.losses.loss_weight import PieceWeights
from lightning_hanayo.strategy.probing.probe import Probe, Verdict
from lightning_hanayo.strategy.probing.rules import (
    EACH,
    NAMED,
    SAMPLES,
    Named,
    Rule,
    are_close,
    named_tensors,
    possible_rules,
)

ALWAYS, EVERY = 16, 64
"""the first batches are all looked at; after so many, one is probed again"""
TRIES = 4
"""probes of a batch of which only parts can be compared"""
MOST_UNKNOWN = 8
"""batches in a row of which nothing can be told"""


@dataclass
class Candidates:
    """The rules that have fitted in all probes; the first one weighs."""

    rules: tuple[Rule, ...] = ()
    _excluded: set[Rule] = field(default_factory=set)

    def take(self, fitting: Sequence[Rule], tried: Collection[Rule]) -> bool:
        """Take what a probe has shown of the rules that it has tried; return whether one is left."""
        self._excluded |= set(tried).difference(fitting)
        known = (*(rule for rule in self.rules if rule in fitting), *fitting, *self.rules)
        self.rules = tuple(rule for rule in dict.fromkeys(known) if rule not in self._excluded)
        return bool(self.rules)

    def weights(self, pieces: Sequence[Named], sizes: Sequence[int]) -> list[list[float] | None]:
        """All weights of these pieces by rules that aren't excluded; the first that weighs now."""
        rules = (rule for rule in possible_rules(pieces) if rule not in self._excluded)
        return [rule.weights(pieces, sizes) for rule in dict.fromkeys((*self.rules, *rules))]

    def differ(self, pieces: Sequence[Named], sizes: Sequence[int]) -> bool:
        """Whether rules that aren't excluded weigh these pieces differently."""
        first, *others = self.weights(pieces, sizes)
        return any(weights is not None and not are_close(first, weights) for weights in others)


@dataclass
class StepChoice:
    """The choices of one run, on one data rank.

    Args:
        probe: of batches.
        num_data: D, data ranks.
        group: of the data ranks; None if there is one.
        device: of this rank.
        watch: looks at the losses of micro-batches, where nothing can be probed.
        named: the rule that the user has named, by which steps of micro-batches are weighed in training.
    """

    probe: Probe
    num_data: int
    group: dist.ProcessGroup | None
    device: torch.device
    watch: LossWatch
    named: str = ""
    runs_once: bool = field(default=False, init=False)
    """for good: no rule puts the losses of micro-batches together"""
    rules: Candidates = field(default_factory=Candidates, init=False)
    """for the loss; none before the first probe"""
    _logged: dict[str, Candidates] = field(default_factory=dict, init=False)
    _num_batches: int = field(default=0, init=False)
    _once: bool = field(default=False, init=False)
    """in the last batch that was probed"""
    _num_unknown: int = field(default=0, init=False)
    _has_given_up: bool = field(default=False, init=False)
    _evaluates_once: dict[str, bool] = field(default_factory=dict, init=False)

    def trains_once(
        self, batch: Any, split: SplitBatch, source: BatchSource, step: Callable[[Any], Any], *, is_first: bool
    ) -> bool:
        """Whether the step of a training batch runs once. Called by all data ranks.

        Args:
            batch: the whole.
            split: the same in micro-batches.
            source: where it comes from.
            step: runs the user's step.
            is_first: whether it is the first batch of an epoch.
        """
        if self.runs_once or self._has_given_up:
            return self.runs_once
        number, self._num_batches = self._num_batches, self._num_batches + 1
        rests = self._num_unknown >= MOST_UNKNOWN  # to probe would only cost time
        if self.named:
            if any(self._gathered(number % EVERY == 0 or (is_first and not rests))):
                self._check_named(
                    self._gathered(self.probe.probe(batch, split, source, step, self._fits, self._differ_by))
                )
            return False
        known = bool(self.rules.rules)
        looks = self.device.type == "cpu" or number < ALWAYS  # else the host would wait in each batch
        is_due = (
            number % EVERY == 0 or not rests and (is_first or not known) or (known and looks and self._differ(split))
        )
        if not any(self._gathered(is_due)):
            return self._once and not known
        self._once = self._probed(batch, split, source, step)
        return self._once

    def _probed(self, batch: Any, split: SplitBatch, source: BatchSource, step: Callable[[Any], Any]) -> bool:
        """Probe a batch; return whether its step runs once. Of parts of it, several probes may be needed."""
        for _ in range(TRIES):
            verdicts = self._gathered(self.probe.probe(batch, split, source, step, self._fits, self._differ_by))
            fits = all(self._gathered(self._fits(self.probe.needed(sum(split.sizes.parts[0])))))
            once, goes_on = self._take(verdicts, fits=fits)
            if fits or not goes_on or not any(self._gathered(self._differ(split))):
                break
        return once

    def evaluates_once(self, stage: str, split: SplitBatch, source: BatchSource, step: Callable[[Any], Any]) -> bool:
        """Whether the step of a batch of an evaluation runs once: asked of the first batch of each stage."""
        if stage not in self._evaluates_once:
            needed = self.probe.needs(split, source, step)
            samples = sum(split.sizes.parts[0])
            self._evaluates_once[stage] = needed is not None and self._fits(samples * needed)
        return self._evaluates_once[stage]

    def weigh(self, pieces: Sequence[Any], sizes: PieceSizes) -> PieceWeights:
        """The weights of a training batch's micro-batches. As in DDP, each data rank counts the same."""
        named, counts = list(map(named_tensors, pieces)), list(sizes.parts[0])
        total = sum(counts)
        by_samples = tuple(n / total for n in counts) if sizes.are_known else (1 / len(counts),) * len(counts)
        rule = next(iter(self.rules.rules), SAMPLES)
        found = rule.weights(named, counts) if sizes.are_known or rule != SAMPLES else None
        in_loss = by_samples if found is None else tuple(found)
        in_mean = by_samples if rule == EACH else in_loss
        in_gradient = tuple(weight / self.num_data for weight in in_loss)
        logged = {}
        for name, candidates in self._logged.items():
            weights = candidates.rules[0].weights(named, counts)
            if weights is not None and not are_close(weights, in_mean):
                logged[name] = tuple(weights)
        return PieceWeights(in_mean, in_loss, in_gradient, is_sum=rule == EACH, logged=logged)

    def _differ(self, split: SplitBatch) -> bool:
        """Whether rules that aren't excluded weigh this batch's micro-batches differently."""
        named, sizes = list(map(named_tensors, split.pieces)), list(split.sizes.parts[0])
        return any(one.differ(named, sizes) for one in (self.rules, *self._logged.values()))

    def _differ_by(self, pieces: Sequence[Named], sizes: Sequence[int]) -> int:
        made = [weights for one in (self.rules, *self._logged.values()) for weights in one.weights(pieces, sizes)]
        if any(weights is not None and 0.0 in weights for weights in made):
            return 0
        return len({tuple(round(one, 6) for one in weights) for weights in made if weights is not None})

    def _take(self, verdicts: Sequence[Verdict], *, fits: bool) -> tuple[bool, bool]:
        """Take the verdicts of all data ranks; return whether the step runs once, and whether rules are known."""
        difference = next((one.difference for one in verdicts if one.difference), "")
        unknown = next((one.unknown for one in verdicts if one.unknown), "")
        if not difference and not unknown:
            self._num_unknown = 0
            tried = {rule for one in verdicts for rule in one.tried}
            if not self.rules.take(_common([one.rules for one in verdicts]), tried):
                difference = "different batches follow different rules"
            for name in {name for one in verdicts for name in one.logged}:
                fitting = _common([one.logged[name] for one in verdicts if name in one.logged])
                if not self._logged.setdefault(name, Candidates()).take(fitting, tried):
                    difference = f"the logged value {name!r} follows different rules in different batches"
        if not all(one.can_be_cut for one in verdicts):
            self._give_up(f"whether losses of micro-batches add up to that of the whole batch isn't known: {unknown}")
        elif difference and fits:
            self.runs_once = True
            rank_zero_info(
                f"{self._differs(difference)}. So from now on the step runs once on whole batches, and only the stack "
                f"is cut, which costs time (docs/guides/losses.md). HanayoStrategy(step='microbatch') accepts the "
                f"difference."
            )
        elif difference:
            self._give_up("")
            warnings.warn(
                f"{self._differs(difference)}. In one piece the step doesn't fit in memory, so the training depends on "
                f"num_microbatches.",
                stacklevel=2,
            )
        elif unknown:
            self._num_unknown += 1
            if self._num_unknown == MOST_UNKNOWN and fits:
                rank_zero_info(
                    f"it can't be told how losses of micro-batches add up ({unknown}), so the step runs once on whole "
                    f"batches. HanayoStrategy(step='microbatch') or loss_weight=... takes less time, if that is right."
                )
            return fits, False
        return self.runs_once, bool(self.rules.rules)

    def _differs(self, difference: str) -> str:
        name = type(self.probe.trainer.lightning_module).__name__
        return f"the losses of micro-batches don't add up to {name}'s loss of the whole batch: {difference}"

    def _check_named(self, verdicts: Sequence[Verdict]) -> None:
        """Warn, once, if the named rule isn't one that puts losses together."""
        self._num_unknown += any(one.unknown for one in verdicts)
        wrong = next((one for one in verdicts if not one.unknown and NAMED not in one.rules), None)
        if wrong is None:
            self._has_given_up = not all(one.can_be_cut for one in verdicts)
            return
        self._has_given_up = True
        why = wrong.difference or f"they are weighed by {wrong.rules[0]}"
        warnings.warn(
            f"loss_weight={self.named} doesn't add up the losses of micro-batches to the loss of the whole batch: "
            f"{why}. Leave it out, so that a probe of the first batches decides what does.",
            stacklevel=2,
        )

    def _give_up(self, why: str) -> None:
        """From now on micro-batches are weighed by samples."""
        self._has_given_up = True
        self.rules = Candidates()
        self._logged = {}
        if why:
            self.watch.is_on = True
            rank_zero_info(f"{why}. They are weighed by samples; set HanayoStrategy(loss_weight=...) if that is wrong.")

    def _fits(self, num_bytes: float) -> bool:
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        else:
            free = psutil.virtual_memory().available
        return num_bytes <= free / 2

    def _gathered(self, value: Any) -> list[Any]:
        return [value] if self.group is None else all_gather_objects(self.group, value)


def _common(rows: Sequence[Sequence[Rule]]) -> list[Rule]:
    return [rule for rule in rows[0] if all(rule in row for row in rows)]
