"""How much each micro-batch counts in the mean loss of its batch.

How many samples an optimizer step takes: the same before and after a resume, on any number of data ranks.

                    batch   data ranks   accumulated     samples per step
saved                 8         4            1                 32
resumed               8         2            1  ->  2          32           scaled: nobody has changed it
resumed              16         2            1                 32           as the user wants it
resumed               8         2            3                 48           refused

Lets the ranks of a cube share the tokens of a step's loss, where all of them have the same samples.

cube_outside    head and loss of a causal model of transformers     chunked_cross_entropy in the step
"share"         whole, of this rank's samples                       the same, chunk by chunk; where the step runs once
                                                                    on a whole batch, as with "replicate"
"replicate"     whole, of all samples                               of this rank's tokens
"tokens"        of this rank's rows of the weight, chunk by chunk   the same; of this rank's tokens, where the weight
                                                                    isn't a parameter
"""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.chunked_loss import cross_entropy, token_shares
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.merge import PieceSizes
from lightning_hanayo.tensor_parallel.mesh import MeshAxis

LossWeight = Literal["samples", "tokens", "shifted_tokens", "sum"] | Callable[[Any], float]
IGNORED_LABEL = -100
_CAUSAL = re.compile("ForCausalLM|LMHeadModel")
"""the names of causal models of transformers"""


def for_model(rule: LossWeight, model: nn.Module, batch_dim: int = 0) -> LossWeight:
    """The rule as it is meant for a model: "tokens" are those that count in a causal model of transformers.

    Such a model shifts its labels, so the first one of each sequence predicts nothing.
    """
    if rule == "tokens" and batch_dim == 0 and any(map(_shifts_labels, model.modules())):
        return "shifted_tokens"
    return rule


def _shifts_labels(part: nn.Module) -> bool:
    """Whether it calls the loss of causal models, by its name: a few such models (Bart's, XLNet) don't, nor shift."""
    kinds = type(part).__mro__
    if not any(kind.__module__ == "transformers.modeling_utils" for kind in kinds):
        return False
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    calls_loss = code is not None and "loss_function" in code.co_names
    return calls_loss and any(_CAUSAL.search(kind.__name__) for kind in kinds)


@dataclass(frozen=True)
class PieceWeights:
    """The weights of the pieces of one data rank's batch, in their order."""

    in_mean: tuple[float, ...]
    """in means over the batch, such as logged ones; they sum to 1"""
    in_loss: tuple[float, ...]
    """in the loss: the same, except for losses that are sums, where each piece has weight 1"""
    in_gradient: tuple[float, ...]
    """in the gradient, which is summed over data ranks"""
    is_sum: bool = False
    """whether the loss is a sum, in training"""
    logged: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """with which logged values are added up, by name, where that isn't their mean"""


class LossWeighting:
    """Weighs the pieces of a batch by `HanayoStrategy(loss_weight=...)`.

    Args:
        rule: what counts: samples, labels, or what the user's function returns.
        num_data: D, data ranks.
        group: the data ranks, for CPU tensors; None if there is one.
    """

    def __init__(self, rule: LossWeight, num_data: int, group: dist.ProcessGroup | None) -> None:
        self._rule = rule
        self._num_data = num_data
        self._group = group

    def for_training(self, pieces: Sequence[Any], sizes: PieceSizes) -> PieceWeights:
        """Weights that sum to 1 over all data ranks. Called by all data ranks.

        By samples (and for sums) every data rank counts the same, as in DDP; otherwise by what it has, summed over
        the data ranks.

        Raises:
            HanayoError: labels are to be counted, and none are found; or samples, and they can't be counted.
        """
        if self._rule == "sum":
            in_mean = _proportions(_counts(pieces, sizes, "samples"))
            present = tuple(float(piece is not None) for piece in pieces)
            return PieceWeights(in_mean, present, tuple(one / self._num_data for one in present), is_sum=True)
        counts = _counts(pieces, sizes, self._rule)
        in_mean, local = _proportions(counts), sum(counts)
        total = local
        if self._rule == "samples":
            total *= self._num_data
        elif self._group is not None:
            summed = torch.tensor([local], dtype=torch.float64)
            dist.all_reduce(summed, group=self._group)
            total = float(summed)
        return PieceWeights(in_mean, in_mean, tuple(n / total if total else 0.0 for n in counts))

    def for_evaluation(self, pieces: Sequence[Any], sizes: PieceSizes) -> PieceWeights:
        """As in training, without other data ranks: there is no gradient. By samples where the rule can't be applied.

        Evaluation batches may lack the labels that training batches have.
        """
        counts = None
        with suppress(Exception):  # the user's function was written for training batches
            counts = None if self._rule == "sum" else _counts(pieces, sizes, self._rule)
        in_mean = _proportions(_counts(pieces, sizes, "samples") if counts is None else counts)
        return PieceWeights(in_mean, in_mean, in_mean)


def _proportions(counts: Sequence[float]) -> tuple[float, ...]:
    total = sum(counts)
    return tuple(n / total if total else 0.0 for n in counts)


def _counts(pieces: Sequence[Any], sizes: PieceSizes, rule: Any) -> list[float]:
    """How much each piece counts; 0 where a rank has none."""
    present = sum(piece is not None for piece in pieces)
    if rule == "samples":
        if present > 1 and not sizes.are_known:
            raise HanayoError(
                "samples can't be counted in what split_batch returned: its tensors have different numbers of rows. "
                "Set loss_weight=lambda micro_batch: ..., which returns the number of samples, say."
            )
        return [0.0 if piece is None else float(n) for n, piece in zip(sizes.parts[0], pieces, strict=True)]
    if callable(rule):
        return [0.0 if piece is None else float(rule(piece)) for piece in pieces]
    labels = [_labels(piece, rule) for piece in pieces if piece is not None]
    counted = [((one[..., 1:] if rule == "shifted_tokens" else one) != IGNORED_LABEL).sum() for one in labels]
    # A device is asked once for all pieces.
    counts = iter(torch.stack(counted).tolist() if counted else ())
    return [0.0 if piece is None else float(next(counts)) for piece in pieces]


def _labels(piece: Any, rule: str) -> Tensor:
    """`batch["labels"]`, `batch.labels`, or the last tensor of a tuple: it must hold integers."""
    if isinstance(piece, Mapping):
        labels = piece.get("labels")
    elif isinstance(piece, (tuple, list)) and piece:
        labels = piece[-1]
    else:
        labels = getattr(piece, "labels", None)
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise HanayoError(
            f"loss_weight={rule!r} counts the labels that aren't -100, but the batch has none: expected "
            "batch['labels'], batch.labels or the last item of a tuple, as integers. Pass a function instead."
        )
    return labels


WAY_OUT = "HanayoStrategy(load_anyway=('samples',)) goes on with other steps."


@dataclass(frozen=True)
class StepSamples:
    """What an optimizer step takes."""

    batch: int
    """the samples of a data rank's batch, of the largest one; 0: not known"""
    data: int
    """the number of data ranks"""
    accumulate: int
    """the number of batches that are accumulated"""

    @property
    def total(self) -> int:
        """Of one step."""
        return self.batch * self.data * self.accumulate

    def __str__(self) -> str:
        return f"{self.batch} x {self.data} data ranks x {self.accumulate} accumulated batches = {self.total}"


def accumulation(saved: StepSamples, now: StepSamples, *, may_scale: bool = True) -> int:
    """Return how many batches to accumulate, so that a step takes as many samples as it did.

    Raises:
        HanayoError: there is no such number, or it must be another one and may not, or the user has chosen another one.
    """
    if not (saved.total and now.total) and (saved.data, saved.accumulate) != (now.data, now.accumulate):
        warnings.warn(
            f"an optimizer step may take other numbers of samples, which can't be counted: {saved.data} data ranks x "
            f"{saved.accumulate} accumulated batches then, {now.data} x {now.accumulate} now.",
            stacklevel=2,
        )
    if not (saved.total and now.total) or saved.total == now.total:
        return now.accumulate
    scaled, rest = divmod(saved.total, now.batch * now.data)
    if may_scale and now.accumulate == saved.accumulate and not rest:
        return scaled
    choice = "another batch size or number of data ranks" if rest else f"accumulate_grad_batches={scaled}"
    raise HanayoError(
        f"an optimizer step took {saved} samples when the checkpoint was saved; now it would take {now}. Choose "
        f"{choice}. {WAY_OUT}"
    )


class SampleCount:
    """Counts the samples of the batches that this rank reads.

    A resume that changes data ranks or accumulation expects a number, where the loader doesn't say its batch size.
    """

    def __init__(self) -> None:
        self.largest = 0
        self._expected: tuple[StepSamples, StepSamples] | None = None

    def expect(self, saved: StepSamples, now: StepSamples) -> None:
        """Check the first batch: a step shall take as many samples as it did. `now.batch` isn't known."""
        self.largest = saved.batch
        if (saved.data, saved.accumulate) != (now.data, now.accumulate):
            self._expected = saved, now

    def note(self, batch: int) -> None:
        """Called before each training batch with its size, or the loader's; 0 if it can't be counted.

        Raises:
            HanayoError: it is the first one after a resume, and steps would take other numbers of samples.
        """
        self.largest = max(self.largest, batch)
        expected, self._expected = self._expected, None
        if expected is not None:
            saved, now = expected
            accumulation(saved, replace(now, batch=batch), may_scale=False)


@dataclass(eq=False, repr=False)
class TokenLosses:
    """The losses of one run in a cube."""

    model: nn.Module
    """the user's module"""
    ranks: MeshAxis
    """of the cube"""
    _: KW_ONLY
    is_required: bool
    """whether each step's loss has to be shared by tokens: `cube_outside="tokens"`"""
    is_allowed: bool = True
    """whether steps may start collectives: not where another micro-batch runs at the same time"""
    arguments: Callable[[], AbstractContextManager[None]] = nullcontext
    """to be entered while a batch runs: gathers weights for functions that can't ask how they are held"""
    _has_shared: bool = field(default=False, init=False)
    _runs_alike: bool = field(default=False, init=False)

    def start(self, set_attribute: Callable[[Any, str, Any], None]) -> None:
        """From now on losses in steps are shared; if required, also those of models that don't do it themselves.

        `set_attribute` sets an attribute of an instance for the time of the run.
        """
        if self.is_required:
            cross_entropy.chunk_losses(self.model, set_attribute)
        token_shares.start(self._shares)

    @contextmanager
    def in_batch(self, *, runs_alike: bool) -> Iterator[None]:
        """To be open while a batch runs, whose steps all ranks of the cube run alike, or on shares of its samples."""
        self._runs_alike = runs_alike
        try:
            with self.arguments():
                yield
        finally:
            self._runs_alike = False

    def stop(self) -> None:
        """The run has ended."""
        token_shares.stop(self._shares)

    def check(self) -> None:
        """Called before a loss's backward, on all ranks of the cube alike.

        Raises:
            UnsupportedError: losses have to be shared, and none has been yet.
        """
        if self.is_required and not self._has_shared:
            raise UnsupportedError(
                f"cube_outside='tokens': {type(self.model).__name__}.training_step has computed its loss from whole "
                "logits. Use lightning_hanayo.chunked_cross_entropy(hidden, weight, labels), or a causal model of "
                "transformers that gets the labels and has an nn.Linear head; or set cube_outside='share'."
            )

    def _shares(self) -> MeshAxis | None:
        if not self._runs_alike or not self.is_allowed:
            return None
        self._has_shared = True
        return self.ranks
