"""Hyperparameters that a folder can't hold, since they can't be stored without pickle: they are left out, and named."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_hanayo.checkpoint.format.plain_values import encode
from lightning_hanayo.errors import HanayoError

_KEYS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)
"""where a checkpoint has them"""
_TYPES = (LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE, LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE)
"""where it has the class of OmegaConf's containers, which come back as dicts"""


def unstorable(values: Mapping[str, Any]) -> dict[str, str]:
    """Of hyperparameters that can't be stored the names, and in short what they are."""
    return {name: type(value).__name__ for name, value in values.items() if not _is_storable(name, value)}


def without_unstorable(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint without the hyperparameters that can't be stored."""
    kept = {key: value for key, value in checkpoint.items() if key not in _TYPES}
    for key in _KEYS:
        if isinstance(kept.get(key), Mapping):
            left_out = unstorable(kept[key])
            kept[key] = {name: value for name, value in kept[key].items() if name not in left_out}
    return kept


def warn_of_unstorable(values: Mapping[str, Any], owner: str) -> None:
    """Name those that checkpoints will not hold."""
    left_out = unstorable(values)
    if left_out:
        listed = ", ".join(f"{name} ({kind})" for name, kind in left_out.items())
        arguments = ", ".join(f"{name}=..." for name in left_out)
        rank_zero_warn(
            f"Checkpoints will not hold these hyperparameters of {owner}, as they can't be stored without pickle: "
            f"{listed}. Give them when you load one, or they have the defaults of __init__: "
            f"load_from_checkpoint(path, {arguments}). To leave them out yourself: "
            f"save_hyperparameters(ignore={[*left_out]})."
        )


def _is_storable(name: str, value: Any) -> bool:
    try:
        encode(value, name)
    except HanayoError:
        return False
    return True
