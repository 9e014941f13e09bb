"""Looks at all gradients before each step of the optimizer: NaN or infinite ones never reach the weights.

    closure: forward, backward, hooks, clipping
    is a gradient on any rank not finite?    one number, all-reduced; after clip_grad_norm_ its norm tells
      no     the optimizer steps
      yes    nonfinite="raise"    all ranks raise one error, which says where the first one was made
             nonfinite="skip"     no rank steps

With a fused optimizer on a GPU the number stays there, and the step does nothing if it is 1. The host reads it a step
later, without waiting. With a gradient scaler (16-mixed) infinite gradients are usual: it skips the step and lowers the
scale. Here that is an error only if the loss isn't finite, or the scale has become useless.

Reads a rank's gradients once, on the device: which of them have NaN or infinite elements.

Finds where the first NaN was made among all that ranks have found, and says it in a sentence.

micro-batch 0     block 0 .. block 3   loss   stage 3 .. stage 1        what is computed from a NaN is NaN
micro-batch 1     block 0 .. NaN NaN   NaN    NaN     .. NaN            began in the forward of block 2
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Self

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_hanayo.errors import NonFiniteError, listed
from lightning_hanayo.pipeline_parallel.nan import BEFORE_STACK, NotedValues, Place
from lightning_hanayo.strategy.joining import on_all_ranks
from lightning_hanayo.strategy.lightning import state
from lightning_hanayo.strategy.norms import GradientNorms
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.votes import SkippedStep


@dataclass(frozen=True)
class GradientLook:
    """A norm of each gradient, on the device. It isn't finite if an element isn't, and else only if it overflows."""

    names: Sequence[str]
    norms: Tensor
    """[gradients]"""

    @staticmethod
    def at(gradients: Mapping[str, Tensor], device: torch.device) -> "GradientLook":
        """Look at gradients. Norms don't overflow on GPUs."""
        found = {name: one for name, gradient in gradients.items() if (one := elements_of(gradient)).numel()}
        if not found:  # an empty one has no largest element
            return GradientLook((), torch.zeros(0, device=device))
        norm_type = 2.0 if device.type == "cpu" else inf  # on the CPU the largest element takes 15 times as long
        return GradientLook(list(found), torch.stack(torch._foreach_norm(list(found.values()), norm_type)).float())

    @property
    def flag(self) -> Tensor:
        """1 if a norm isn't finite, else 0; on the device."""
        return self.norms.isfinite().all().logical_not().float()

    def nonfinite(self) -> list[str]:
        """The gradients whose norm isn't finite. The host waits for the device."""
        return [
            name for name, is_finite in zip(self.names, self.norms.isfinite().tolist(), strict=True) if not is_finite
        ]


def elements_of(gradient: Tensor) -> Tensor:
    """The elements of a gradient that are stored."""
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient


class HostFlag:
    """A number of the device, copied to the host without waiting for it."""

    def __init__(self, value: Tensor) -> None:
        self._copy, self._event = value, None
        if value.is_cuda:
            self._copy = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._copy.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> bool:
        """Whether it isn't 0. A step later the device has mostly passed it."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._copy)


_DIRECTIONS = ("forward", "loss", "backward")


@dataclass(frozen=True)
class Finding:
    """What one rank has found: places whose values aren't finite, and whether each is NaN; names of gradients."""

    rank: int
    places: Sequence[tuple[Place, bool]]
    gradients: Sequence[str]
    """parameters of this rank whose gradient isn't finite"""
    before_clipping: Sequence[str] = ()
    """those whose gradient wasn't finite when its norm was taken; clipping then spoils all"""


@dataclass(frozen=True)
class BlockNames:
    """The names of the stack's blocks, and the blocks of each stage."""

    blocks: Sequence[str]
    stages: Sequence[range]

    def of_block(self, index: int) -> str:
        """A block and its stage."""
        stage = next(number for number, blocks in enumerate(self.stages) if index in blocks)
        return f"{self.blocks[index]} (stage {stage})"

    def of_stage(self, stage: int) -> str:
        """The blocks of a stage, and what else runs in it."""
        blocks = self.stages[stage]
        names = " to ".join(self.blocks[i] for i in sorted({blocks[0], blocks[-1]})) if blocks else "the loss"
        return f"{names} (stage {stage})"

    def stage_of(self, name: str) -> int:
        """The stage of a parameter; 0 outside the stack."""
        block = next((i for i, block in enumerate(self.blocks) if name.startswith(f"{block}.")), 0)
        return next(number for number, blocks in enumerate(self.stages) if block in blocks)


def first_of(findings: Collection[Finding]) -> tuple[int, Place, bool] | None:
    """The rank and the first place of the first micro-batch whose loss, or a gradient after it, isn't finite.

    And whether it is NaN there, not infinite.
    """
    found = [(one.rank, place, is_nan) for one in findings for place, is_nan in one.places]
    reached = {(place.batch, place.microbatch) for _, place, _ in found if place.direction != "forward"}

    def order(one: tuple[int, Place, bool]) -> Any:
        rank, place, _ = one
        microbatch, sign = (place.batch, place.microbatch), -1 if place.direction == "backward" else 1
        direction = _DIRECTIONS.index(place.direction)
        return microbatch not in reached, microbatch, direction, sign * place.pass_number, sign * place.index, rank

    return min(found, key=order, default=None)


def loss_is_finite(findings: Collection[Finding]) -> bool:
    """Whether all losses are."""
    return all(place.direction != "loss" for one in findings for place, _ in one.places)


def described(findings: Sequence[Finding], blocks: BlockNames, place_of: Callable[[int], str]) -> str:
    """Where it began, as the end of a sentence. `place_of` says which rank a rank is."""
    origin = first_of(findings)
    if origin is None:
        found = {one.rank: one.before_clipping for one in findings if one.before_clipping}
        found = found or {one.rank: one.gradients for one in findings if one.gradients}
        if not found:
            return "no longer known where"
        rank = min(found)
        names = listed(sorted({name for each in found.values() for name in each}), most=3)
        return f"only in gradients of parameters: {names}, on rank {rank} ({place_of(rank)})"
    first_rank, place, is_nan = origin
    batch = f" of batch {place.batch} of those that accumulate" if place.batch else ""
    value = "NaN" if is_nan else "infinite"
    where = f"{_where(place, blocks)}, micro-batch {place.microbatch}{batch}"
    return f"first in {where}, on rank {first_rank} ({place_of(first_rank)}), which made a value that is {value}"


def _where(place: Place, blocks: BlockNames) -> str:
    if place.direction == "loss":
        return "the loss: all blocks' outputs were finite"
    if place.direction == "backward":
        return f"the backward of {blocks.of_stage(place.index)}"
    if place.index == BEFORE_STACK:
        return f"the input of {blocks.of_block(0)}: in the batch, or in the code before the blocks"
    return f"the forward of {blocks.of_block(place.index)}"


Closure = Callable[[], Any]
SMALLEST_SCALE = 2.0**-10
"""of a gradient scaler, which starts at 2**16: with a smaller one even gradients of millions don't fit into fp16"""
_ALWAYS_SAID = 3
"""so many skipped steps are reported one by one, later ones whenever their number has doubled"""


@dataclass(frozen=True)
class _Late:
    """What is known of a step whose flag the host hasn't read yet."""

    step: int
    flag: HostFlag
    noted: NotedValues
    look: GradientLook | None = None
    useless_scale: HostFlag | None = None
    """whether the gradient scaler's scale is too small; None without a scaler"""


@dataclass(eq=False, repr=False)
class NonFiniteCheck:
    """One rank's look at gradients before each step. Its methods are called by all ranks of the world."""

    run: Run
    """of the Trainer; notes the values that this rank's stages make"""
    parameters: Mapping[str, nn.Parameter]
    """those that this rank trains, by name"""
    blocks: BlockNames
    """of all stages, for messages"""
    norms: GradientNorms
    """of the whole model's gradients"""

    def __post_init__(self) -> None:
        self._late: _Late | None = None
        self.num_skipped = 0
        """how many steps were skipped, but for those that a gradient scaler has skipped"""
        run = self.run
        run.values.on_nan = self._detected
        run.parts.add(self.close)
        plugin = run.trainer.precision_plugin
        state.call_before_steps(plugin, run.attributes, self.before_step, on_unscaled=self.after_unscaling)
        if self.norms.groups is None:  # of several ranks, torch's functions give it
            state.call_with_norm(plugin, run.attributes, self.norms.note_total)

    def __deepcopy__(self, memo: object) -> Self:
        """A copy of a Trainer, which a callback may make, has none of its own: the run's connections exist once."""
        return self

    def step(self, step: Callable[[Closure], Any], optimizer: Optimizer, closure: Closure) -> Any:
        """Step the optimizer: `step` runs the closure and the hooks, and then updates the parameters."""
        result: Any = None

        def run() -> Any:
            nonlocal result
            result = closure()
            return result

        try:
            with _restored(optimizer):
                return step(run)
        except SkippedStep:
            return result
        finally:
            vars(optimizer).pop("found_inf", None)

    def before_step(self, optimizer: Optimizer, clip: Callable[[], object]) -> None:
        """Called when gradients are complete, after all hooks; clips them, as the user wants it, and looks at them.

        Raises:
            NonFiniteError: one of them, on any rank, isn't finite.
        """
        self.norms.forget_total()
        clip()
        if self._ignores:
            return
        self.read_late()
        total, noted = self.norms.total_of_all, self.run.values.take()
        if takes_flag(optimizer):
            look = self._look(optimizer)
            optimizer.found_inf = flag = self._agreed(look.flag)  # type: ignore[attr-defined]
            self._late = _Late(self._num_steps, HostFlag(flag), noted, look)
        elif self._is_found(optimizer, total):
            names = self._look(optimizer).nonfinite()
            exact = [name for name in names if not _is_finite(self.parameters[name].grad)]
            first = set(self.norms.nonfinite_of_totals()) if exact else ()
            findings = self._gather(noted, exact, [name for name in exact if self.parameters[name] in first])
            if any(one.gradients for one in findings):
                self._report(findings, self._num_steps)
                raise SkippedStep

    def after_unscaling(self, optimizer: Optimizer, found: Tensor, scale: Tensor) -> None:
        """Called by a gradient scaler with what all ranks together have found. It skips the step if that isn't 0.

        Raises:
            NonFiniteError: the loss isn't finite, or the scale is useless.
        """
        if self._ignores:
            return
        self.read_late()
        is_useless, noted = HostFlag(scale < SMALLEST_SCALE), self.run.values.take()
        self._late = _Late(self._num_steps, HostFlag(found), noted, useless_scale=is_useless)
        if not takes_flag(optimizer):  # the scaler reads it on the host anyway
            self.read_late()

    def read_late(self) -> None:
        """Read what was left on the device a step before. Called before the next step, and at the end of training.

        Raises:
            NonFiniteError: a gradient of that step wasn't finite.
        """
        late, self._late = self._late, None
        if late is None or not late.flag.read():
            return
        findings = self._gather(late.noted, late.look.nonfinite() if late.look is not None else [])
        if late.useless_scale is None:
            self._report(findings, late.step)
        elif self.run.options.nonfinite == "raise" and (late.useless_scale.read() or not loss_is_finite(findings)):
            self._report(findings, late.step, scale=" at any loss scale" if late.useless_scale.read() else "")

    def _detected(self, place: Place) -> None:
        """Called by the rank that makes a NaN, at once, with `Trainer(detect_anomaly=True)`.

        Raises:
            NonFiniteError: always.
        """
        finding = Finding(self.run.rank, [(place, True)], ())
        where = described([finding], self.blocks, self.run.topology.place)
        raise NonFiniteError(f"optimizer step {self._num_steps}: {where} (detect_anomaly=True)")

    def close(self) -> None:
        """The run has ended."""
        self._late = None
        self.run.values.on_nan = lambda _: None

    def _is_found(self, optimizer: Optimizer, total: Tensor | None) -> bool:
        """Whether a rank's gradients aren't finite, or only their norms. Here the host waits for the device."""
        flag = self._look(optimizer).flag if total is None else total.isfinite().logical_not().float()
        if total is None or self.run.groups.data is not None:  # the norm is the same on all ranks of a replica
            flag = self._agreed(flag)
        return bool(flag)

    def _look(self, optimizer: Optimizer) -> GradientLook:
        """Gradients of parameters that the optimizer doesn't have harm nothing; nobody sets them to zero."""
        steps = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients = {n: p.grad for n, p in self.parameters.items() if id(p) in steps and p.grad is not None}
        return GradientLook.at(gradients, self.norms.device)

    def _agreed(self, flag: Tensor) -> Tensor:
        """The flag of any rank, on all of them."""
        groups = self.run.groups
        if groups.data is not None:
            dist.all_reduce(flag)
        elif groups.replica_tensors.size() > 1:
            dist.all_reduce(flag, group=groups.replica_tensors)
        return flag.clamp_(max=1.0)

    def _gather(
        self, noted: NotedValues, gradients: Sequence[str], before_clipping: Sequence[str] = ()
    ) -> list[Finding]:
        """What all ranks have found."""
        own = Finding(self.run.rank, noted.nonfinite(), list(gradients), list(before_clipping))
        return on_all_ranks(lambda: own)

    def _report(self, findings: Sequence[Finding], step: int, *, scale: str = "") -> None:
        """Raise, or count the step that is skipped.

        Raises:
            NonFiniteError: nonfinite="raise".
        """
        where = described(findings, self.blocks, self.run.topology.place)
        what = f"optimizer step {step}: NaN or infinite gradients{scale}, {where}"
        if self.run.options.nonfinite == "raise":
            raise NonFiniteError(
                f"{what}. The weights are as they were before this step. Trainer(detect_anomaly=True) finds the line "
                f"of a backward; HanayoStrategy(nonfinite='skip') leaves out such steps."
            )
        self.num_skipped += 1
        if self.num_skipped <= _ALWAYS_SAID or self.num_skipped.bit_count() == 1:
            rank_zero_info(f"{what}. All ranks skip this step (nonfinite='skip'; {self.num_skipped} so far).")

    @property
    def _num_steps(self) -> int:
        return self.run.trainer.global_step

    @property
    def _ignores(self) -> bool:
        """Whether NaN may come: a search for a learning rate goes on until the loss is."""
        return self.run.options.nonfinite == "ignore" or state.searches_rate(self.run.trainer)


def takes_flag(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernels read `found_inf` on the device, so that no host has to."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return getattr(optimizer, "_step_supports_amp_scaling", False) and any(p.is_cuda for p in parameters)


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(elements_of(gradient).isfinite().all())


@contextmanager
def _restored(optimizer: Optimizer) -> Iterator[None]:
    """LBFGS changes the weights between the closures of a step: what it began with comes back if one finds a NaN."""
    if not isinstance(optimizer, LBFGS):
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    except (SkippedStep, NonFiniteError):
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        optimizer.state.clear()  # what it knows of the curvature includes the NaN
        raise
