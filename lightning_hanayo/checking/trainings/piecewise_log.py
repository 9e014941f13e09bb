"""Keeps back what a step logs for its pieces, and logs one value for them all, as a layout does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("sum", torch.sum, sum), torch.sum),
    **dict.fromkeys(("max", torch.max, max), torch.amax),
    **dict.fromkeys(("min", torch.min, min), torch.amin),
}
"""by `reduce_fx`; all others are means"""


@dataclass
class _Logged:
    """What was logged under one name: `values[data rank]` has a pair (weight, value) for each micro-batch."""

    keywords: dict[str, Any]
    values: list[list[tuple[float, Any]]]
    batch_sizes: list[int]
    """of each data rank"""


class PiecewiseLog:
    """Takes the place of `module.log` while pieces run. Only data rank 0's values count, or with sync_dist all."""

    def __init__(self, module: pl.LightningModule, num_data: int) -> None:
        self._not_merged: set[str] = set()
        """what one call of `log` can't express: names in `trainer.callback_metrics`, and when they count"""
        self._log: Callable[..., None] = module.log
        self._num_data = num_data
        self._piece: tuple[int, float, int] | None = None
        self._logged: dict[str, _Logged] = {}
        self._sums: list[list[float]] = []
        object.__setattr__(module, "log", self._keep)

    def begin(self, data_rank: int, weight: float, num_samples: int) -> None:
        """A piece's step starts."""
        self._piece = data_rank, weight, num_samples

    def finish(self, sums: Sequence[Sequence[Tensor]] = ()) -> None:
        """All pieces are done: log. `sums`: their losses by data rank, if these are sums; logged, they are added up."""
        self._piece = None
        self._sums = [[float(loss) for loss in row] for row in sums]
        for name, logged in self._logged.items():
            self._log(name, self._merged(name, logged), **logged.keywords | {"batch_size": logged.batch_sizes[0] or 1})
        self._logged.clear()

    def means_of(self, data_rank: int, piece: int) -> list[Any]:
        """What the step has logged as means for a piece, of what it logs once for each."""
        means = (one for one in self._logged.values() if one.keywords.get("reduce_fx", "mean") not in _REDUCTIONS)
        rows = (one.values[data_rank] for one in means)
        return [row[piece][1] for row in rows if piece < len(row)]

    def has_merged(self, name: str) -> bool:
        """Whether a value, such as "train_loss (epoch)", is that of all pieces."""
        return f"{name.partition(' (')[0]} {'epoch' if name.endswith('(epoch)') else 'batch'}" not in self._not_merged

    def _keep(self, name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
        if self._piece is None or arguments:
            return self._log(name, value, *arguments, **keywords)
        data_rank, weight, num_samples = self._piece
        if name not in self._logged:
            self._logged[name] = _Logged(keywords, [[] for _ in range(self._num_data)], [0] * self._num_data)
        logged = self._logged[name]
        logged.values[data_rank].append((weight, value))
        logged.batch_sizes[data_rank] += keywords.get("batch_size") or num_samples
        return None

    def _merged(self, name: str, logged: _Logged) -> Any:
        first = next(value for row in logged.values for _, value in row)
        if isinstance(first, Metric):
            if sum(map(len, logged.values)) > 1:  # its value in a batch is that of the last piece
                self._not_merged |= {f"{name} batch", f"{name}_step batch"}
            return first
        if logged.keywords.get("sync_dist") and len(set(logged.batch_sizes)) > 1:  # each data rank has its own weight
            self._not_merged |= {f"{name} epoch", f"{name}_epoch epoch"}
        reduction = _REDUCTIONS.get(logged.keywords.get("reduce_fx", "mean"))
        rows = logged.values if logged.keywords.get("sync_dist") else logged.values[:1]
        is_sum = bool(self._sums) and [[float(value) for _, value in row] for row in rows] == self._sums[: len(rows)]
        merged = [_reduced(row, torch.sum if is_sum else reduction) for row in rows if row]
        return _reduced([(1.0, value) for value in merged], reduction)


def _reduced(pairs: Sequence[tuple[float, Any]], reduction: Callable[[Tensor], Tensor] | None) -> Tensor:
    """The weighted mean (None), or another reduction, of (weight, value). With weight 0 not even a NaN counts."""
    values = torch.stack([torch.as_tensor(value, dtype=torch.get_default_dtype()).detach() for _, value in pairs])
    if reduction is not None:
        return reduction(values)
    weights = torch.tensor([weight for weight, _ in pairs])
    total = weights.sum()
    return (values.nan_to_num() if not total else values[weights > 0] * weights[weights > 0] / total).sum()
