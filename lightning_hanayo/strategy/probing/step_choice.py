"""Decides for each batch, on pipeline rank 0, how often the step runs: once, or once for each micro-batch.

                      training                                   validation, test
step="microbatch"     for each micro-batch                       for each micro-batch
step="auto"           for each, where a probe finds a rule       once, if it fits in memory
                      that puts losses and logs together;
                      else once, if it fits in memory
step="batch"          once                                       once
"""

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_hanayo.partition.stack import modules_outside
from lightning_hanayo.pipeline_parallel.batches.merge import PieceSizes
from lightning_hanayo.pipeline_parallel.capture.dry_step import DrySteps
from lightning_hanayo.pipeline_parallel.object_collectives import all_gather_objects
from lightning_hanayo.strategy.batch_split import SplitBatch
from lightning_hanayo.strategy.losses import LossWeight, LossWeighting, PieceWeights
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.probing.comparison import (
    CLOSE,
    EACH,
    NAMED,
    SAMPLES,
    Named,
    Rule,
    Weighed,
    are_close,
    named_tensors,
)
from lightning_hanayo.strategy.probing.probe import Probe, Sample, Verdict
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.tensor_parallel.boundary import AllGatherObject

if TYPE_CHECKING:
    from lightning_hanayo.strategy.setup.prepared_model import Cube

ALWAYS, LOOKS = 16, 64
"""the first batches are all looked at; later, where the host would wait for it, every so many"""
FIXED, EVERY = (0, 64, 256), 1024
"""numbers of batches that are probed again whatever they look like; then every so many"""
TRIES = 4
"""probes of a batch of which only parts can be compared"""
_IN_PARTS = "pairs=True runs it on two micro-batches at once (without it, it would run once on whole batches)"
REFUTED = 8
"""repeated values at the ends of a tensor's sequences that turned out to count: then all are taken for tokens"""
MOST_UNKNOWN = 8
"""batches in a row of which nothing can be told"""


@dataclass
class Candidates:
    """The rules that have fitted in all probes; the first one weighs."""

    rules: tuple[Rule, ...] = ()
    _excluded: set[Rule] = field(default_factory=set)
    _alike: dict[Rule, float] = field(default_factory=dict)
    """by how much a rule's weights differed from the first one's, where a probe couldn't tell which is right"""

    def take(self, fitting: Sequence[Rule], tried: Collection[Rule]) -> bool:
        """Take what a probe has shown of the rules that it has tried; return whether one is left."""
        self._excluded |= set(tried).difference(fitting)
        known = (*(rule for rule in self.rules if rule in fitting), *fitting, *self.rules)
        self.rules = tuple(rule for rule in dict.fromkeys(known) if rule not in self._excluded)
        return bool(self.rules)

    def weights(self, batch: Weighed) -> dict[Rule, list[float] | None]:
        """The weights of a batch's pieces by all rules that aren't excluded; the first is the one that weighs now."""
        rules = (rule for rule in batch.possible if rule not in self._excluded)
        refuted = Counter(rule.path for rule in self._excluded if rule.is_token and rule.is_shifted)
        others = (rule for rule in rules if not rule.is_token or refuted[rule.path] < REFUTED)
        return {rule: batch.by(rule) for rule in (*self.rules, *others)}

    def differ(self, batch: Weighed) -> bool:
        """Whether rules weigh its pieces differently, by more than where a probe couldn't tell them apart."""
        return any(by > max(CLOSE, 2 * self._alike.get(rule, 0.0)) for rule, by in self._differences(batch))

    def leave(self, batch: Weighed) -> None:
        """Note that a probe of the batch couldn't tell the rules that are left apart."""
        for rule, by in self._differences(batch):
            self._alike[rule] = max(by, self._alike.get(rule, 0.0))

    def _differences(self, batch: Weighed) -> Iterator[tuple[Rule, float]]:
        """By how much the weights of rules that aren't excluded differ from the first one's."""
        (_, first), *others = self.weights(batch).items()
        for rule, weights in others:
            if weights is not None:
                yield rule, 1.0 if first is None else max(abs(a - b) for a, b in zip(first, weights, strict=True))


@dataclass
class StageRules:
    """The rules for the values of one stage's steps."""

    loss: Candidates = field(default_factory=Candidates)
    """and for what steps return; none before the first probe"""
    logged: dict[str, Candidates] = field(default_factory=dict)

    @property
    def all(self) -> list[Candidates]:
        """Those of all values."""
        return [self.loss, *self.logged.values()]

    def differ(self, batch: Weighed) -> bool:
        """Whether rules that aren't excluded weigh the batch's pieces differently."""
        return any(one.differ(batch) for one in self.all)

    def num_ways(self, pieces: Sequence[Named], sizes: Sequence[int]) -> int:
        """In how many ways they weigh these pieces; 0: in one of them a piece has no weight."""
        batch = Weighed(pieces, sizes)
        made = [one.weights(batch).values() for one in self.all]
        rows = [weights for values in made for weights in values if weights is not None]
        return 0 if any(0.0 in row for row in rows) else len({tuple(round(one, 6) for one in row) for row in rows})

    def take(self, verdicts: Sequence[Verdict]) -> tuple[str, str]:
        """Take what probes have shown; return a difference that no rule explains, and why it can't be told.

        Both are empty where rules were found.
        """
        difference = next((one.difference for one in verdicts if one.difference), "")
        unknown = next((one.unknown for one in verdicts if one.unknown), "")
        if difference or unknown:
            return difference, unknown
        tried = {rule for one in verdicts for rule in one.tried}
        if not self.loss.take(_common([one.rules for one in verdicts]), tried):
            difference = "different batches follow different rules"
        for name in {name for one in verdicts for name in one.logged}:
            fitting = _common([one.logged[name] for one in verdicts if name in one.logged])
            fitting.sort(key=lambda rule: rule not in self.loss.rules)
            if not self.logged.setdefault(name, Candidates()).take(fitting, tried):
                difference = f"the logged value {name!r} follows different rules in different batches"
        return difference, ""


@dataclass
class StepChoice:
    """The choices of one run, on one data rank.

    Args:
        run: of the Trainer.
        probe: of batches.
        in_cube: gathers objects from the ranks of the cube, which all have the same batch.
        may_run_once: whether steps can run once on a whole batch.
        named: the rule that the user has named, by which steps of micro-batches are weighed in training.
    """

    run: Run
    probe: Probe
    in_cube: AllGatherObject
    may_run_once: bool
    named: str
    runs_once: bool = field(default=False, init=False)
    """for good: no rule puts the losses of micro-batches together"""
    rules: StageRules = field(default_factory=StageRules, init=False)
    """of training"""
    _num_batches: int = field(default=0, init=False)
    _num_evaluated: int = field(default=0, init=False)
    _once: bool = field(default=False, init=False)
    """in the last batch that was probed"""
    _num_unknown: int = field(default=0, init=False)
    _names: set[str] = field(default_factory=set, init=False)
    """under which training steps have logged values"""
    _has_new_name: bool = field(default=False, init=False)
    _trained: tuple[bool, ...] = field(default=(), init=False)
    """of parameters outside the stack, in the last batch"""
    _has_given_up: bool = field(default=False, init=False)
    _evaluates_once: dict[str, bool] = field(default_factory=dict, init=False)
    _evaluations: dict[str, StageRules | None] = field(default_factory=dict, init=False)
    """by stage; None: it can't be told, or a value follows none"""

    @staticmethod
    def of_run(run: Run, pipeline: Pipeline, cube: "Cube | None", rule: LossWeight) -> "StepChoice | None":
        """The choices of a run; None where an option has made them. `rule`: weighs micro-batches, if it was named."""
        ends, options, module = pipeline.ends.get(False), run.options, run.module
        probes = options.step == "auto" and not pipeline.runs_whole_batches and module.automatic_optimization
        if ends is None or not probes:
            return None
        is_single, user = pipeline.runs_whole_steps, ends.user_step
        if cube is None and not is_single:  # no block may run in the step
            user = pipeline.ends[True].user_step
        outside = list(module.modules()) if is_single else modules_outside(module, pipeline.ownership.stack)
        first_block = None if cube is None else cube.first_block(ends.stages[0])
        own = [pipeline.ownership.blocks(stage) for stage in pipeline.ownership.stages_of(pipeline.rank)]
        weighting, names = LossWeighting(rule, 1, None), options.loss_weight != "auto"
        probe = Probe(
            run,
            DrySteps(user, module, outside, first_block, pipeline.gather_in_cube),
            outside,
            pipeline.gradients.dry_runs,
            sum(map(len, own)) if options.recompute == "none" else 1,
            (lambda pieces, sizes: weighting.for_training(pieces, sizes).in_loss) if names else None,
        )
        named = repr(getattr(options.loss_weight, "__name__", options.loss_weight)) if names else ""
        return StepChoice(run, probe, pipeline.gather_in_cube, len(pipeline.ends) > 1 or is_single, named)

    def trains_once(self, given: Sample, *, is_first: bool) -> bool:
        """Whether the step of a training batch runs once. Called by all data ranks.

        Args:
            given: the batch.
            is_first: whether it is the first batch of an epoch.
        """
        if self.runs_once or self._has_given_up:
            return self.runs_once
        number, self._num_batches = self._num_batches, self._num_batches + 1
        rests = self._num_unknown >= MOST_UNKNOWN  # to probe would only cost time
        if self.named:
            if any(self._gathered(_is_fixed(number) or (is_first and not rests))):
                self._check_named(self._gathered(self._verdict(self.rules, given)))
            return False
        known = bool(self.rules.loss.rules)
        trained, self._trained = self._trained, self.probe.trained
        is_due = _is_fixed(number) or trained != self._trained or self._has_new_name
        is_due |= not rests and (is_first or not known)
        is_due = is_due or (known and self._looks(number) and self.rules.differ(_weighed(given.split)))
        if not any(self._gathered(is_due)):
            return self._once and not known
        self._once = self._probed(given)
        return self._once

    def _probed(self, given: Sample) -> bool:
        """Probe a batch; return whether its step runs once. Of parts of it, several probes may be needed."""
        for _ in range(TRIES):
            verdicts = self._gathered(self._verdict(self.rules, given))
            fits = all(self._gathered(self._fits(self.probe.needed(sum(given.split.sizes.parts[0])))))
            once, goes_on = self._take(verdicts, fits=fits)
            weighed = _weighed(given.split)
            is_open = goes_on and any(self._gathered(self.rules.differ(weighed)))
            if fits or not is_open:
                break
        else:
            warnings.warn(
                f"parts of a batch don't tell how the losses of micro-batches add up: they are weighed by "
                f"{self.rules.loss.rules[0]}. Set HanayoStrategy(loss_weight=...) if that is wrong.",
                stacklevel=2,
            )
        if goes_on:
            for one in self.rules.all:
                one.leave(weighed)
        return once

    def evaluates_once(self, given: Sample) -> bool:
        """Whether the step of a batch of an evaluation runs once: decided by the first batch of each stage.

        Else batches are probed in which rules for the values that steps log and return differ.
        """
        stage, split = given.source.stage, given.split
        if stage not in self._evaluates_once:
            needed = self.probe.needs(given) if self.may_run_once else None
            samples = sum(split.sizes.parts[0])
            fits = needed is not None and self._fits(samples * needed)
            self._evaluates_once[stage] = all(self.in_cube(fits))
        if self._evaluates_once[stage] or self.named:
            return self._evaluates_once[stage]
        is_first = stage not in self._evaluations
        rules, weighed = self._evaluations.setdefault(stage, StageRules()), _weighed(split)
        number, self._num_evaluated = self._num_evaluated, self._num_evaluated + 1
        if rules is None or not (is_first or self._looks(number) and rules.differ(weighed)):
            return False
        for _ in range(TRIES):
            verdicts = self.in_cube(self._verdict(rules, given, trains=False))
            difference, unknown = rules.take(verdicts)
            if difference or unknown:
                self._evaluations[stage] = None
                self._tell_of_evaluation(stage, difference, unknown)
                return False
            if not rules.differ(weighed):
                break
        else:
            self._tell_of_evaluation(stage, "", "parts of a batch don't tell")
        for one in rules.all:
            one.leave(weighed)
        return False

    def _tell_of_evaluation(self, stage: str, difference: str, unknown: str) -> None:
        if not difference:
            what = "they are weighed by samples"
            rank_zero_info(f"it can't be told how the values of {stage} micro-batches add up ({unknown}), so {what}.")
            return
        warnings.warn(
            f"the values of micro-batches don't add up to those of {self._name}'s {stage} step of the whole batch: "
            f"{difference}. {self._why_in_parts}, so they are weighed by samples. Count them in a torchmetrics.Metric.",
            stacklevel=2,
        )

    def note_logged(self, names: set[str]) -> None:
        """Called after each training batch. Where a name is new, the next batch is probed."""
        self._has_new_name = bool(self._names and names - self._names)
        self._names |= names

    def knows(self, stage: str) -> bool:
        """Whether rules for the values of an evaluation's stage were found."""
        return self._evaluations.get(stage) is not None

    def weigh(self, pieces: Sequence[Any], sizes: PieceSizes, stage: str = "") -> PieceWeights:
        """The weights of a batch's micro-batches, of an evaluation's `stage`, or of training.

        As in DDP, each data rank counts the same.
        """
        rules = (self._evaluations.get(stage) if stage else self.rules) or StageRules()
        present = [i for i, piece in enumerate(pieces) if piece is not None]
        counts = list(sizes.of(present).parts[0])
        batch = Weighed([named_tensors(pieces[i]) for i in present], counts)

        def of_all(weights: Sequence[float]) -> tuple[float, ...]:
            found = dict(zip(present, weights, strict=True))
            return tuple(found.get(i, 0.0) for i in range(len(pieces)))

        total = sum(counts)
        by_samples = [n / total for n in counts] if sizes.are_known else [1 / len(counts)] * len(counts)
        rule = next(iter(rules.loss.rules), SAMPLES)
        found = batch.by(rule) if sizes.are_known or rule != SAMPLES else None
        in_loss = of_all(by_samples if found is None else found)
        in_mean = of_all(by_samples) if rule == EACH else in_loss
        in_gradient = tuple(weight / self.run.topology.data for weight in in_loss)
        logged = {}
        for name, candidates in rules.logged.items():
            weights = batch.by(candidates.rules[0])
            if weights is not None and not are_close(of_all(weights), in_mean):
                logged[name] = of_all(weights)
        return PieceWeights(in_mean, in_loss, in_gradient, is_sum=rule == EACH, logged=logged)

    def _verdict(self, rules: StageRules, given: Sample, *, trains: bool = True) -> Verdict:
        fits = lambda num_bytes: all(self.in_cube(self._fits(num_bytes)))  # noqa: E731
        return self.probe.probe(given, fits, rules.num_ways, trains=trains)

    def _take(self, verdicts: Sequence[Verdict], *, fits: bool) -> tuple[bool, bool]:
        """Take the verdicts of all data ranks; return whether the step runs once, and whether rules are known."""
        difference, unknown = self.rules.take(verdicts)
        if not unknown:
            self._num_unknown = 0
        can_be_cut = all(one.can_be_cut for one in verdicts)
        if unknown and not can_be_cut:
            self._give_up(f"whether losses of micro-batches add up to that of the whole batch isn't known: {unknown}")
        elif difference and fits and self.may_run_once and can_be_cut:
            self.runs_once = True
            rank_zero_info(
                f"{self._differs(difference)}. So from now on the step runs once on whole batches, and only the stack "
                "is cut (docs/guides/losses.md). HanayoStrategy(step='microbatch') accepts the difference."
            )
        elif difference:
            self._give_up("")
            why = self._why_in_parts if can_be_cut else "Blocks get the samples of a whole batch in one sequence"
            warnings.warn(
                f"{self._differs(difference)}. {why}, so the training depends on num_microbatches.",
                stacklevel=2,
            )
        elif unknown:
            self._num_unknown += 1
            once = fits and self.may_run_once
            if self._num_unknown == MOST_UNKNOWN:
                what = (
                    "the step runs once on whole batches. HanayoStrategy(step='microbatch') or loss_weight=... takes "
                    "less time, if that is right"
                    if once
                    else "they are weighed by samples. Set HanayoStrategy(loss_weight=...) if that is wrong"
                )
                rank_zero_info(f"it can't be told how losses of micro-batches add up ({unknown}), so {what}.")
            return once, False
        return self.runs_once, bool(self.rules.loss.rules)

    def _differs(self, difference: str) -> str:
        return f"the losses of micro-batches don't add up to {self._name}'s loss of the whole batch: {difference}"

    @property
    def _name(self) -> str:
        return type(self.run.module).__name__

    @property
    def _why_in_parts(self) -> str:
        return "In one piece the step doesn't fit in memory" if self.may_run_once else _IN_PARTS

    def _looks(self, number: int) -> bool:
        """Whether to look for differences: not always where the host would wait in each batch."""
        return self.run.device.type == "cpu" or number < ALWAYS or number % LOOKS == 0

    def _check_named(self, verdicts: Sequence[Verdict]) -> None:
        """Warn, once, if the named rule isn't one that puts losses together."""
        self._num_unknown += any(one.unknown for one in verdicts)
        wrong = next((one for one in verdicts if not one.unknown and NAMED not in one.rules), None)
        if wrong is None:
            self._has_given_up = any(one.unknown and not one.can_be_cut for one in verdicts)
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
        self.rules = StageRules()
        if why:
            rank_zero_info(f"{why}. They are weighed by samples; set HanayoStrategy(loss_weight=...) if that is wrong.")

    def _fits(self, num_bytes: float) -> bool:
        device = self.run.device
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        else:
            free = psutil.virtual_memory().available
        return num_bytes <= free / 2

    def _gathered(self, value: Any) -> list[Any]:
        group = self.run.groups.data_control
        of_data = [value] if group is None else all_gather_objects(group, value)
        return [one for row in self.in_cube(of_data) for one in row]


def _is_fixed(number: int) -> bool:
    return number in FIXED or number % EVERY == 0


def _weighed(split: SplitBatch) -> Weighed:
    pieces, sizes = split.counted
    return Weighed(list(map(named_tensors, pieces)), sizes)


def _common(rows: Sequence[Sequence[Rule]]) -> list[Rule]:
    return [rule for rule in rows[0] if all(rule in row for row in rows)]
