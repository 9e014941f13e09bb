"""The training loaders of this rank: their states and random generators, and the size of their batches."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


def loader_states(trainer: "pl.Trainer") -> list[Any]:
    """The states of the loaders with `state_dict()`, after the batch that was trained last. Called where data is read.

    Lightning reads a loader without a length one batch ahead, so its state is the one before that batch.
    """
    is_ahead = _is_read_ahead(trainer)
    return [loader.state_before if is_ahead else loader.state_dict() for loader in stateful_loaders(trainer)]


def random_states_before(trainer: "pl.Trainer") -> dict[str, Tensor]:
    """The states of the random generators before the batch that was read ahead; none if there isn't one."""
    loaders = stateful_loaders(trainer) if _is_read_ahead(trainer) else ()
    return {} if not loaders else dict(loaders[0].random_before)


def _is_read_ahead(trainer: "pl.Trainer") -> bool:
    return bool(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def load_loader_states(trainer: "pl.Trainer", states: Sequence[Any]) -> None:
    """Let the loaders continue where they were. There are as many states as stateful loaders, or none."""
    for loader, state in zip(stateful_loaders(trainer), states, strict=False):
        loader.load_state_dict(state)


def generators_of_loaders(trainer: "pl.Trainer") -> dict[str, torch.Generator]:
    """The generators that the user has given to loaders and their samplers, by a name."""
    found: dict[str, torch.Generator] = {}
    for i, loader in enumerate(_training_loaders(trainer)):
        for owner in ("sampler", "loader"):
            generator = getattr(loader if owner == "loader" else getattr(loader, "sampler", None), "generator", None)
            if isinstance(generator, torch.Generator) and generator not in found.values():
                found[f"{owner}{i}"] = generator
    return found


def stateful_loaders(trainer: "pl.Trainer") -> list[Any]:
    """The training loaders that say what they have read."""
    loaders = _training_loaders(trainer)
    return [one for one in loaders if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]


def batch_size(trainer: "pl.Trainer") -> int | None:
    """How many samples the training loader puts into a batch; None if it doesn't say, or if there are several."""
    loaders = _training_loaders(trainer)
    size = getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None
    return size if isinstance(size, int) else None


def _training_loaders(trainer: "pl.Trainer") -> list[Any]:
    """None before the loop has asked for them."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)
