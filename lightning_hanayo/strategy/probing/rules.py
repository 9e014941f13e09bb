"""Rules by which the losses of micro-batches are weighed: what each of them counts, read off the batch.

labels          [7, 3, -100, -100]   [2, 2, 9, -100]
"samples"        1                    1
not -100         2                    3
not -100 ->      1                    2       shifted: the first label of each sequence predicts nothing
sum of mask      ...
1 each           1                    1       losses are sums: nothing is divided
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hanayo.pipeline_parallel.batches.plan import BatchRule
from lightning_hanayo.pipeline_parallel.batches.reader import named_arrays

IGNORED_LABEL = -100
MANY_CLASSES = 64
"""with more values, those of a label for each sample aren't tried one by one"""
CLOSE = 1e-6
"""weights that differ by less are the same"""

Named = Mapping[str, Tensor]
"""the tensors of a piece, by where they are"""


@dataclass(frozen=True)
class Rule:
    """What a piece of a batch counts.

    Args:
        kind: samples; 1 for each piece; labels in a tensor other than `ignored`; the sum of a tensor; or what the user
            has named.
        path: of the tensor.
        ignored: the value of labels that don't count.
        is_shifted: whether the first of each sequence doesn't count.
    """

    kind: Literal["samples", "each", "labels", "sum", "named"]
    path: str = ""
    ignored: int = IGNORED_LABEL
    is_shifted: bool = False

    def __str__(self) -> str:
        shifted = ", without the first of each sequence" * self.is_shifted
        match self.kind:
            case "samples":
                return "samples"
            case "each":
                return "nothing: the losses are added up"
            case "labels":
                return f"the values of {self.path} other than {self.ignored}{shifted}"
            case _:
                return f"the sum of {self.path}{shifted}"

    @property
    def is_token(self) -> bool:
        """Whether it leaves out one value of labels, which may stand for padding."""
        return self.kind == "labels" and self.ignored != IGNORED_LABEL

    def counts(self, pieces: Sequence[Named], sizes: Sequence[int]) -> list[float] | None:
        """What each piece counts; None if a piece has no such tensor."""
        if self.kind == "samples":
            return list(map(float, sizes))
        if self.kind == "each":
            return [1.0] * len(sizes)
        found = [piece.get(self.path) for piece in pieces]
        if any(one is None for one in found):
            return None
        counted = [self._count(one) for one in found if one is not None]
        return [float(one) for one in torch.stack(counted).tolist()]

    def weights(self, pieces: Sequence[Named], sizes: Sequence[int]) -> list[float] | None:
        """The weight of each piece's loss; None if there is none."""
        counts = self.counts(pieces, sizes)
        if counts is None or self.kind == "each":
            return counts
        total = sum(counts)
        return [n / total for n in counts] if total else None

    def _count(self, tensor: Tensor) -> Tensor:
        if self.is_shifted:
            tensor = tensor[..., 1:]
        return (tensor != self.ignored).sum().double() if self.kind == "labels" else tensor.sum(dtype=torch.float64)


SAMPLES, EACH, NAMED = Rule("samples"), Rule("each"), Rule("named")


class Weighed:
    """The pieces of a batch, and their weights by each rule, which are computed once.

    Args:
        pieces: the tensors of each.
        sizes: the samples of each.
    """

    def __init__(self, pieces: Sequence[Named], sizes: Sequence[int]) -> None:
        self._pieces, self._sizes = pieces, sizes
        self._made: dict[Rule, list[float] | None] = {}

    @cached_property
    def possible(self) -> tuple[Rule, ...]:
        """All rules that they tell of."""
        return tuple(possible_rules(self._pieces))

    def by(self, rule: Rule) -> list[float] | None:
        """Their weights by a rule; None if there are none."""
        if rule not in self._made:
            self._made[rule] = rule.weights(self._pieces, self._sizes)
        return self._made[rule]


def named_tensors(piece: Any) -> Named:
    """The tensors of a piece, by where they are."""
    return {path: one for path, one, _ in named_arrays(piece, BatchRule(), "batch") if isinstance(one, Tensor)}


def possible_rules(pieces: Sequence[Named]) -> Iterator[Rule]:
    """All rules that these pieces of a batch tell of: those for labels first, then sums of masks and weights.

    A value that may stand for padding is -100, one that ends or begins a sequence several times, or a class.
    """
    yield from (SAMPLES, EACH)
    paths = [path for path in pieces[0] if all(path in piece and piece[path].ndim for piece in pieces)]
    for path in paths:
        tensors = [piece[path] for piece in pieces]
        if tensors[0].is_floating_point() or tensors[0].is_complex() or tensors[0].dtype == torch.bool:
            continue
        for value in sorted({IGNORED_LABEL}.union(*map(_possibly_ignored, tensors))):
            yield from (Rule("labels", path, value, shifted) for shifted in (False, True)[: tensors[0].ndim])
    for path in paths:
        if not pieces[0][path].is_complex():
            yield from (Rule("sum", path, 0, shifted) for shifted in (False, True)[: pieces[0][path].ndim])


def _possibly_ignored(tensor: Tensor) -> set[int]:
    if tensor.ndim == 1:
        values = tensor.unique()
        return set(values.tolist()) if len(values) <= MANY_CLASSES else set()
    if tensor.shape[-1] < 2:
        return set()
    ends = [tensor[..., i][tensor[..., i] == tensor[..., j]] for i, j in ((0, 1), (-1, -2))]
    return set(torch.cat(ends).unique().tolist())


def are_close(weights: Sequence[float] | None, others: Sequence[float | None], tolerance: float = CLOSE) -> bool:
    """Whether there are weights, and they are the same as the others; None: one that isn't known."""
    return weights is not None and all(
        b is None or abs(a - b) <= tolerance * max(1.0, abs(a)) for a, b in zip(weights, others, strict=True)
    )
