"""Hyperparameters that a folder can't hold, since they can't be stored without pickle: they are left out, and named."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_hanayo.checkpoint.format.plain_values import encode
from lightning_hanayo.errors import HanayoError

_KEYS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, "datamodule_hyper_parameters")
"""where a checkpoint has them"""


def unstorable(values: Mapping[str, Any]) -> dict[str, str]:
    """Of hyperparameters that can't be stored the names, and why."""
    return {name: why for name, value in values.items() if (why := _problem(name, value))}


def without_unstorable(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint without the hyperparameters that can't be stored."""
    kept = dict(checkpoint)
    for key in _KEYS:
        if isinstance(kept.get(key), Mapping):
            left_out = unstorable(kept[key])
            kept[key] = {name: value for name, value in kept[key].items() if name not in left_out}
    return kept


def warn_of_unstorable(values: Mapping[str, Any], owner: str) -> None:
    """Name those that checkpoints will not hold."""
    left_out = unstorable(values)
    if left_out:
        rank_zero_warn(
            f"Checkpoints will not hold these hyperparameters of {owner}, as they can't be stored without pickle: "
            f"{'; '.join(left_out.values())}. load_from_checkpoint needs them as arguments. To leave them out "
            f"yourself: save_hyperparameters(ignore=[...])."
        )


def _problem(name: str, value: Any) -> str:
    try:
        encode(value, name)
    except HanayoError as error:
        return str(error)
    return ""
