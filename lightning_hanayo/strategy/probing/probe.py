"""Finds out, by numbers on the user's own batch, whether the steps of micro-batches add up to one step, and how.

    some samples together    dry step  ->  gradient at the stack's output    g[a]           g[b]
    the same in two parts    dry steps ->                                    ga             gb
                                                                             g[a] = w_a ga  g[b] = w_b gb

If one number w_a, and one w_b, does that in several draws of outputs of the stack, these are the weights of the parts'
losses, and all rules that give them are kept: samples, labels, sums of masks, or 1 each. Else the loss is none of
micro-batches, and so it is if blocks get other arguments, or logged values differ whatever the rule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.merge import PieceSizes
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchSource, children, with_children
from lightning_hanayo.pipeline_parallel.capture.dry_step import DrySteps, Ran
from lightning_hanayo.pipeline_parallel.rng import generator_states, set_generators
from lightning_hanayo.pipeline_parallel.stages import find_loss
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.lightning.metrics import copy_state, recorded_logs, restore_state
from lightning_hanayo.strategy.probing import comparison
from lightning_hanayo.strategy.probing.comparison import NAMED, Named, Rule, are_close, named_tensors, possible_rules
from lightning_hanayo.strategy.run import Run

DRAWS, WHOLE_DRAWS = 4, 2
"""of outputs of the stack: a loss of the largest values of few samples is a mean over samples in one of them"""
ODD = 0.7
"""scales a loss so that its gradients are rounded otherwise, as powers of 2 would not"""
SAMPLED = 2**14
"""elements of each gradient outside the stack that are compared"""


@dataclass(frozen=True)
class Verdict:
    """What a probe has shown: rules that fit, a difference that none explains, or neither."""

    rules: tuple[Rule, ...] = ()
    logged: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    """for each logged value the rules that fit"""
    difference: str = ""
    """what differs between one step and steps of micro-batches, whatever the rule"""
    unknown: str = ""
    """why it can't be told from this batch"""
    tried: tuple[Rule, ...] = ()
    """the rules that this batch tells of"""
    can_be_cut: bool = True
    """whether the blocks' arguments of the whole batch can be cut into micro-batches"""


Differ = Callable[[Sequence[Named], Sequence[int]], int]
"""In how many ways the rules that come into question weigh pieces of these sizes; 0: in one of them a piece has none"""


@dataclass(frozen=True)
class Sample:
    """A batch that may be probed, and the step that runs on it."""

    batch: Any
    """the whole"""
    split: SplitBatch
    """the same in micro-batches"""
    source: BatchSource
    """where it comes from"""
    step: Callable[[Any], Any]
    """runs the user's step"""


@dataclass
class Probe:
    """Probes batches of one run on one rank.

    Args:
        run: of the Trainer.
        steps: runs dry steps.
        outside: the modules outside the stack.
        ready: to be entered while dry steps run.
        num_kept: of how many blocks this rank keeps the activations until their backward.
        named: weighs pieces by the rule that the user has named, which is tried, too.
    """

    run: Run
    steps: DrySteps
    outside: Sequence[nn.Module]
    ready: Callable[[], AbstractContextManager[None]] = nullcontext
    num_kept: int = 0
    named: Callable[[Sequence[Any], PieceSizes], Sequence[float]] | None = None
    sample_bytes: float = field(default=0.0, init=False)
    """that the code outside the stack needs for each sample, at most"""
    kept_bytes: float = field(default=0.0, init=False)
    """that blocks keep for each sample, at most"""

    def __post_init__(self) -> None:
        self.trainer, self.device = self.run.trainer, self.run.device
        self.splitter = BatchSplitter(self.run.options.batch_rule)
        """cuts micro-batches in two"""

    def probe(self, given: Sample, fits: Callable[[float], bool], differ: Differ, *, trains: bool = True) -> Verdict:
        """Probe a batch, which stays as it is.

        All of it and its micro-batches are compared, if so many bytes `fits` in memory; else some samples and halves
        of them, on which rules differ most.

        Args:
            given: the batch.
            fits: whether so many bytes are free.
            differ: tells on which pieces rules differ most.
            trains: whether the step has a loss with a gradient; else only values that it logs and returns are compared.
        """
        precisely = torch.autocast(self.device.type, enabled=False)
        if torch.is_autocast_enabled(self.device.type):
            with precisely:
                verdict = self._probe(given, fits, differ, trains)
            if not verdict.unknown:
                return verdict
        return self._probe(given, fits, differ, trains)

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each parameter outside the stack needs a gradient now."""
        return tuple([parameter.requires_grad for parameter in self._parameters()])

    def _parameters(self) -> Iterator[nn.Parameter]:
        for module in self.outside:
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)

    def needed(self, samples: int) -> float:
        """The bytes that a training step of so many samples needs on this rank, at most."""
        parameters = sum(parameter.nbytes for parameter in self._names())
        return samples * (2 * self.sample_bytes + self.kept_bytes) + parameters

    def _probe(self, given: Sample, fits: Callable[[float], bool], differ: Differ, trains: bool) -> Verdict:
        split, step = given.split, given.step
        if not split.sizes.are_known:
            return Verdict(unknown="the samples of its micro-batches can't be counted", can_be_cut=False)
        pieces, sizes = split.counted
        with self.ready(), self.steps.running(), self._undone():
            try:
                some = min(zip(sizes, pieces, strict=True), key=lambda pair: pair[0])
                self._note_bytes(self._run(step, some[1], some[0], lambda _, made: made), some[0])
            except UnsupportedError as error:
                return Verdict(unknown=_failure(error), can_be_cut=False)
            except Exception:  # do more samples run?
                self.sample_bytes = self.kept_bytes = 0.0
            if fits(self.needed(sum(sizes))):
                union, parts, draws = given.batch, split, WHOLE_DRAWS
            else:
                found = self._choose(given, differ)
                if found is None:
                    return Verdict(unknown="no two samples of a micro-batch can be cut apart")
                union, parts, draws = *found, DRAWS
            return self._compare(union, parts, step, draws if trains else 1, trains=trains)

    def _choose(self, given: Sample, differ: Differ) -> tuple[Any, SplitBatch] | None:
        """Samples, and the same in two parts: those on which rules differ most."""
        found: list[tuple[int, Any, SplitBatch]] = []
        pieces, count = given.split.counted[0], len(given.split.present)
        while True:
            for piece in pieces:
                with suppress(HanayoError):
                    parts = self.splitter.split(own_copy(piece), 2, given.source)
                    if parts.num_microbatches == 2 and parts.sizes.are_known:
                        halves, sizes = parts.counted
                        found.append((differ(list(map(named_tensors, halves)), sizes), piece, parts))
            if found or count == 1:
                break
            count //= 2
            try:  # larger pieces: single samples can't be cut, for one
                pieces = self.splitter.split(own_copy(given.batch), count, given.source).counted[0]
            except HanayoError:
                break
        return max(found, key=lambda one: one[0])[1:] if found else None

    def _compare(
        self, union: Any, parts: SplitBatch, step: Callable[[Any], Any], draws: int, *, trains: bool
    ) -> Verdict:
        pieces, sizes = parts.counted
        named = list(map(named_tensors, pieces))
        possible = list(possible_rules(named))
        made: dict[Rule, Sequence[float] | None] = {rule: rule.weights(named, sizes) for rule in possible}
        if self.named is not None:
            possible.append(NAMED)
            made[NAMED] = self.named(pieces, parts.sizes.of(parts.present))
        logged: dict[str, list[Rule]] = {}
        kept, is_known, can_be_cut = possible, False, True
        outputs = comparison.Outputs(sizes)
        try:
            for draw in range(draws):
                whole, runs = self._runs(step, union, parts, outputs, draw)
                is_low = any(one.dtype in comparison.HALF for one in (*whole.ran.tensors, *self._parameters()))
                is_rough = is_low or torch.is_autocast_enabled(self.device.type)
                tolerance = comparison.ROUGH if is_rough else comparison.EXACT
                try:
                    if not draw:
                        can_be_cut = comparison.check_arguments(whole, runs, sizes, outputs.gaps, tolerance)
                    if not trains:
                        comparison.check_logged(whole, runs, made, logged, tolerance.value)
                        kept = comparison.rules_of_returned(whole, runs, made, tolerance.value)
                        is_known = True
                        break
                    noise: dict[str, float] = {}
                    if not whole.ran.tensors and tolerance is comparison.ROUGH:
                        scaled = self._run(step, union, sum(sizes), lambda _, made: made, scale=ODD)
                        noise = comparison.rounding(whole, scaled)
                    if not draw:
                        rerun = partial(self.steps.run, step, own_copy(pieces[0]), sizes[0])
                        self._check_state(rerun, whole, runs)
                    if not whole.ran.tensors:  # no block is cut off: all gradients are there
                        is_known = bool(whole.outside)
                        kept = [rule for rule in kept if comparison.adds_up(whole, runs, made[rule], noise)]
                        if not kept:
                            raise comparison.Differs("no rule makes of their gradients that of all samples")
                        comparison.check_logged(whole, runs, made, logged, tolerance.value)
                        break
                    weights = comparison.weights_of(whole, runs, outputs, tolerance)
                    comparison.check_outside(whole, runs, weights, tolerance)
                    if any(weight is not None for weight in weights):
                        is_known = True
                        kept = [rule for rule in kept if are_close(made[rule], weights, tolerance.weight)]
                    if not kept:
                        raise comparison.Differs(f"{comparison.shown(weights, sizes)}, which no rule explains")
                    comparison.check_logged(whole, runs, made, logged, tolerance.value)
                except comparison.Differs as difference:
                    if whole.is_random:
                        raise comparison.Unknown(
                            "the step draws random numbers, and its results differ"
                        ) from difference
                    raise
            if not is_known:
                raise comparison.Unknown("the loss has no gradient at the stack's output")
        except comparison.Differs as difference:
            return Verdict(difference=str(difference), can_be_cut=can_be_cut)
        except comparison.Unknown as reason:
            can_be_cut &= not isinstance(reason, comparison.CannotBeCut)
            return Verdict(unknown=str(reason), can_be_cut=can_be_cut)
        tried = tuple(rule for rule in possible if made[rule] is not None)
        return Verdict(tuple(kept), {key: tuple(own) for key, own in logged.items()}, tried=tried)

    def _note_bytes(self, run: comparison.DryRun, num_samples: int) -> None:
        self.sample_bytes = run.ran.num_bytes / num_samples
        self.kept_bytes = self.num_kept * run.ran.block_bytes / num_samples

    def _runs(
        self, step: Callable[[Any], Any], union: Any, parts: SplitBatch, outputs: comparison.Outputs, draw: int
    ) -> tuple[comparison.DryRun, list[comparison.DryRun]]:
        """Dry runs of the samples together, and of their parts, which begin with the same random numbers."""
        states = generator_states(self.device)
        try:
            pieces, sizes = parts.counted
            whole = self._run(step, union, sum(sizes), outputs.of_union(draw))
            if not self.sample_bytes:
                self._note_bytes(whole, sum(sizes))
        except Exception as error:
            kind = comparison.CannotBeCut if isinstance(error, UnsupportedError) else comparison.Unknown
            raise kind(_failure(error)) from error
        runs = []
        for number, piece in enumerate(pieces):
            try:
                set_generators(states, self.device)
                runs.append(self._run(step, piece, sizes[number], outputs.of_part(number)))
            except UnsupportedError as error:
                raise comparison.CannotBeCut(str(error)) from error
            except comparison.Unknown:
                raise
            except Exception as error:
                raise comparison.Differs(
                    f"the step fails on fewer samples ({type(error).__name__}: {error})"
                ) from error
        set_generators(states, self.device)  # for the run of a scaled loss
        return whole, runs

    def needs(self, given: Sample) -> float | None:
        """The bytes that the code outside the stack needs for each sample of an evaluation's batch, at most.

        None where a whole batch can't be cut into micro-batches in front of the stack.
        """
        try:
            found = self._choose(given, lambda *_: 1)
            if found is None:
                return None
            union, parts = found
            pieces, sizes = parts.counted
            with self.ready(), self.steps.running(), self._undone():
                whole = self._run(given.step, union, sum(sizes), lambda _, made: made)
                part = self._run(given.step, pieces[0], sizes[0], lambda _, made: made)
                comparison.check_arguments(whole, [part], sizes, {}, comparison.Tolerance(float("inf"), 0.0))
        except Exception:
            return None
        shapes = [[tuple(tensor.shape) for tensor in call.tensors] for call in whole.ran.calls]
        repeats = all(shapes[i] == shapes[i % 2] for i in range(len(shapes)))  # else later passes can't be cut
        return whole.ran.num_bytes / sum(sizes) if repeats else None

    def _check_state(
        self, rerun: Callable[..., Ran], whole: comparison.DryRun, parts: Sequence[comparison.DryRun]
    ) -> None:
        """Check that numbers and buffers that steps change are as after one step, once those of all parts have run.

        So are sums over samples, and what further steps leave as it is. `rerun` runs the first part once more.

        Raises:
            Differs: they aren't.
        """
        first = parts[0].ran.after
        for name in rerun(after=first).after if first else ():
            with suppress(KeyError, RuntimeError):  # a part leaves it as it is, or its shape changes
                before, after = (torch.as_tensor(state[name]).double() for state in (whole.ran.before, whole.ran.after))
                changes = [torch.as_tensor(one.ran.after[name]).double() - before for one in parts]
                if torch.allclose(before + torch.stack(changes).sum(0), after):
                    continue
            raise comparison.Differs(f"{name} differs, which each step changes")

    def _run(
        self, step: Callable[[Any], Any], samples: Any, num_samples: int, given: Any, scale: float = 1.0
    ) -> comparison.DryRun:
        before = generator_states(self.device)
        with recorded_logs(self.trainer) as recorded:
            ran = self.steps.run(step, own_copy(samples), num_samples, given)
        after = generator_states(self.device)
        is_random = any(not torch.equal(before[name], after[name]) for name in before)
        gradients, outside = self._gradients(ran, find_loss(ran.result), scale)
        return comparison.DryRun(ran, gradients, outside, recorded, is_random)

    def _gradients(self, ran: Ran, loss: Tensor | None, scale: float) -> tuple[list[Tensor], dict[str, Tensor]]:
        """At the stack's outputs, and at parameters outside; made of the scaled loss, and then unscaled."""
        leaves = [one for one in ran.tensors if one.requires_grad]
        if loss is None or not loss.requires_grad:
            return [torch.zeros_like(one) for one in leaves], {}
        if loss.numel() != 1:
            raise comparison.Unknown("the step returns no loss of one element")
        names = self._names()
        made: Sequence[Tensor | None] = torch.autograd.grad(
            loss.reshape(()) * scale, [*leaves, *names], allow_unused=True
        )
        at_outputs = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, made, strict=False)]
        sampled = {
            name: one.to_dense() if one.is_sparse else one.flatten()[:: max(1, one.numel() // SAMPLED)].clone()
            for name, one in zip(names.values(), made[len(leaves) :], strict=True)
            if one is not None
        }
        if scale != 1.0:
            sampled = {name: one.double() / scale for name, one in sampled.items()}
        return at_outputs, sampled

    def _names(self) -> dict[nn.Parameter, str]:
        outside = {id(module) for module in self.outside}
        return {
            parameter: f"{prefix}.{name}" if prefix else name
            for prefix, module in self.trainer.lightning_module.named_modules()
            if id(module) in outside
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and not parameter.is_meta
        }

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Metrics, random numbers and the wish to stop are as before afterwards."""
        metrics = [part for part in self.trainer.lightning_module.modules() if isinstance(part, Metric)]
        saved = [(metric, copy_state(metric)) for metric in metrics]
        states, stops = generator_states(self.device), self.trainer.should_stop
        try:
            yield
        finally:
            self.trainer.should_stop = stops
            set_generators(states, self.device)
            for metric, state in saved:
                restore_state(metric, state)


def own_copy(piece: Any) -> Any:
    """A copy of a micro-batch, which a dry run may change."""
    if type(piece) in (dict, list, tuple):
        return with_children(piece, {key: own_copy(value) for key, value in (children(piece) or {}).items()})
    return piece.clone() if isinstance(piece, Tensor) else deepcopy(piece)


def _failure(error: Exception) -> str:
    return f"a dry run of the step fails ({type(error).__name__}: {error})"
