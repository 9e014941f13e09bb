"""The training loaders of this rank: their states and random generators, and the size of their batches."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
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


def have_more(trainer: "pl.Trainer") -> list[bool]:
    """For each loader with a state, whether it has batches that the epoch has not read so far, or will not read.

    So it is at the end of epochs that `limit_train_batches`, or a shorter loader next to it, has cut.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    num_read = batches.processed
    without_end = _is_read_ahead(trainer) or num_read == trainer.num_training_batches
    loaders = stateful_loaders(trainer)
    lengths = [sized_len(loader) for loader in loaders]
    return [
        getattr(loader, "leaves_out", False) or (without_end if not length else num_read % length > 0)
        for loader, length in zip(loaders, lengths, strict=True)
    ]


def load_loader_states(trainer: "pl.Trainer", states: Sequence[Any], skip: Sequence[bool] = ()) -> None:
    """Let the loaders continue where they were, or where `skip` says so with their next epoch."""
    for loader, state, skips in zip_longest(stateful_loaders(trainer), states, skip):
        if loader is not None and state is not None:
            loader.load_state_dict(state)
            if skips:
                loader.skip_rest()


def generators_of_loaders(trainer: "pl.Trainer") -> dict[str, torch.Generator]:
    """The generators that the user has given to loaders and their samplers, by a name."""
    found: dict[str, torch.Generator] = {}
    for i, loader in enumerate(_training_loaders(trainer)):
        for owner in ("sampler", "loader"):
            generator = getattr(loader if owner == "loader" else getattr(loader, "sampler", None), "generator", None)
            if isinstance(generator, torch.Generator) and generator not in found.values():
                found[f"{owner}{i}"] = generator
    return found


def has_persistent_workers(trainer: "pl.Trainer") -> bool:
    """Whether workers of a training loader live longer than an epoch."""
    return any(getattr(loader, "persistent_workers", False) for loader in _training_loaders(trainer))


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
