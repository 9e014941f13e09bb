"""Notes one number for each value that a stage makes, on the device: should a NaN appear, they tell where it began.

    action     1F0 of blocks 2, 3           last F0        last B0         1B0
    noted      sum of each block's output   the loss       sum of the gradient that the stage passes on
    step 7     0.31  0.28                   2.25           0.02            0.01
    step 8     0.33  nan                    nan            nan             nan      began in the forward of block 3

A sum is NaN or infinite if an element is. Nobody reads the numbers, and no host waits for them, until a NaN was found.
But with `Trainer(detect_anomaly=True)` each is read at once, so that the rank that makes a NaN is the one that fails.
torch's own anomaly mode looks at backwards alone: a NaN that a forward makes shows in a backward on another rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_requires_grad = attrgetter("requires_grad")
BEFORE_STACK = -1
"""stands for the block before the first one: user code, and the batch"""
Direction = Literal["forward", "loss", "backward"]


@dataclass(frozen=True)
class Place:
    """Where a value was made.

    Args:
        batch: which of the batches that accumulate for one optimizer step, from 0.
        microbatch: its number on this rank.
        pass_number: the pass through the stack.
        direction: whether it is the output of a block, the loss, or the gradient that a stage passes on.
        index: of the block, or of the stage.
    """

    batch: int
    microbatch: int
    pass_number: int
    direction: Direction
    index: int = 0


@dataclass
class MadeValues:
    """What one rank has made since the optimizer's last step. Nothing is noted unless it `is_watched`."""

    is_watched: bool = False
    on_nan: Callable[["Place"], object] = lambda _: None
    """called with the place of a NaN while anomalies are detected; it may raise"""
    calls: dict[int, Any] = field(default_factory=dict)
    """by block: takes the arguments of the first call of those that are in it"""
    _places: list[tuple[Any, ...]] = field(default_factory=list)
    """the arguments of each `Place`"""
    _sums: list[Tensor] = field(default_factory=list)
    """of each place; those of earlier batches in one tensor"""
    action: tuple[int, int, bool] = (0, 0, False)
    """micro-batch, pass, and whether it is a forward: of the action of a stage that runs"""
    _batch: int = -1
    _is_on: bool = False
    _is_complete: bool = False
    """whether the optimizer may have stepped after the last batch"""

    @contextmanager
    def batch(self, *, is_last: bool) -> Iterator[None]:
        """Inside it a batch trains; `is_last`: of those that accumulate for one step, which the user may leave out."""
        if self._is_complete:
            self.take()
        self._is_complete = is_last
        if len(self._sums) > 1:
            self._sums = [_stacked(self._sums)]
        self._batch += 1
        self._is_on = self.is_watched or torch.is_anomaly_enabled()
        try:
            yield
        finally:
            self._is_on = False

    def save(self) -> tuple[int, int, bool]:
        """What belongs to the action that runs now, while another one runs."""
        return self.action

    def restore(self, saved: tuple[int, int, bool]) -> None:
        """The action runs again."""
        self.action = saved

    def note_block(self, index: int, output: object) -> None:
        """Called with each block's output; with `BEFORE_STACK` and the first block's arguments."""
        if self._is_on and self.action[2]:  # in a backward it is made again, to save memory
            leaves = (output,) if isinstance(output, Tensor) else tree_leaves(output)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
            # a mask may well be infinite, and a batch have a NaN for a missing value: those don't have gradients
            found: Iterable[Tensor] = list(filter(_requires_grad, tensors))
            if not found and index != BEFORE_STACK:  # of a frozen block: what is infinite may be a mask
                found = (_sum(one).nan_to_num(nan, 0.0, 0.0) for one in tensors if _may_have_gradient(one))
            self._note("forward", index, found)

    def note_call(self, index: int, args: object, output: object) -> None:
        """Called after each block has run."""
        if index == 0:
            self.note_block(BEFORE_STACK, args)
        if index in self.calls:
            self.calls[index] = self.calls[index] or args
        self.note_block(index, output)

    def note_gradients(self, stage: int, gradients: Iterable[Tensor]) -> None:
        """Called with the gradients that a stage passes on."""
        if self._is_on:
            self._note("backward", stage, gradients)

    def note_loss(self, microbatch: int, loss: Tensor) -> None:
        """Called with each micro-batch's loss that counts."""
        if self._is_on:
            self._add((self._batch, microbatch, 0, "loss"), (loss,))

    def take(self) -> "NotedValues":
        """What was noted since this was called before, at the last step of the optimizer."""
        noted = NotedValues(self._places, self._sums)
        self._places, self._sums, self._batch = [], [], -1
        return noted

    def _note(self, direction: Direction, index: int, tensors: Iterable[Tensor]) -> None:
        microbatch, pass_number, _ = self.action
        self._add((self._batch, microbatch, pass_number, direction, index), tensors)

    def _add(self, place: tuple[Any, ...], tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._places.append(place)
            self._sums.append(_sum(tensor.detach()))
            if torch.is_anomaly_enabled() and isnan(self._sums[-1]):
                self.on_nan(Place(*place))


@dataclass(frozen=True)
class NotedValues:
    """What a rank has made for one step of the optimizer: places, and the sum of each."""

    places: Sequence[tuple[Any, ...]]
    """the arguments of each `Place`"""
    sums: Sequence[Tensor]

    def nonfinite(self) -> list[tuple[Place, bool]]:
        """Where values were NaN or infinite, and whether NaN. The host waits for the device."""
        sums = _stacked(self.sums).tolist() if self.sums else []
        return [(Place(*place), isnan(one)) for place, one in zip(self.places, sums, strict=True) if not isfinite(one)]


def _stacked(sums: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.float().reshape(-1) for one in sums])


def _sum(tensor: Tensor) -> Tensor:
    """NaN or infinite if an element is. A sum in fp16 would overflow; in bf16 it is added in fp32 anyway."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)


def _may_have_gradient(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.element_size() > 1
