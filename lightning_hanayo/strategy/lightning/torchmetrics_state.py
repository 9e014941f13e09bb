"""torchmetrics: over which ranks metrics sync, and what they have seen, to be restored."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


class GatherOver:
    """torchmetrics' gather function over `group`. Copies of a metric share it; pickled ones lose the group."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        """One tensor per rank of the group."""
        return gather_all_tensors(result, self._group)

    def __deepcopy__(self, _: Any) -> "GatherOver":
        return self

    def __reduce__(self) -> Any:
        return GatherOver, ()


def sync_metrics_over(module: nn.Module, group: Any, attributes: TemporaryAttributes) -> None:
    """Let torchmetrics sync over the ranks of `group` only."""
    for part in module.modules():
        if isinstance(part, Metric) and isinstance(part.dist_sync_fn, GatherOver | None):
            part.dist_sync_fn = None  # a copy that was made during another run still holds that run's
            attributes.set(part, "dist_sync_fn", GatherOver(group))


def copy_state(metric: Metric) -> Any:
    """What a metric has seen so far."""
    return metric._copy_state_dict(), (metric._update_count, metric._computed, metric._forward_cache)


def restore_state(metric: Metric, state: Any) -> None:
    """Let a metric forget what it has seen since `copy_state`."""
    values, (metric._update_count, metric._computed, metric._forward_cache) = state
    for name, value in values.items():
        setattr(metric, name, value)
