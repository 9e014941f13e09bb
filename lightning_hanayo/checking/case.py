"""What is checked: the user's module, batches and options, as all runs get them; and what a rank of a run returns.

Takes what a check needs from the user: batches, the strategy's options, and the callbacks that change a training.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_hanayo.checking.comparison import Values
from lightning_hanayo.errors import HanayoError, counted
from lightning_hanayo.pipeline_parallel.batches.microbatches import children, with_children
from lightning_hanayo.strategy.lightning.loaders import are_collated, shape_of_loaders
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.topology import Topology, cube_sizes, resolve


@dataclass(frozen=True)
class TrainerOptions:
    """The Trainer's options that change the training, by the names that it gives them."""

    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    callbacks: tuple[Callback, ...] = ()


@dataclass(frozen=True)
class Case:
    """One module on one layout. Each run works on its own copy.

    Args:
        module: with its initial values, or one that builds itself in `configure_model`.
        batches: batch i of data rank r is `batches[i * D + r]`.
        options: the strategy's.
        topology: the layout's ranks.
        trainer: the Trainer's options.
        steps: optimizer steps.
        depth: how many blocks are kept; None: all of them.
        dtype: of parameters and batches.
        seed: of all random numbers.
        has_dropout: False: probabilities are set to zero.
        loaders: the containers of the loaders that each batch has a part of, with None for each; None: there is one.
        are_collated: whether torch's `default_collate` has made the batches.
    """

    module: pl.LightningModule
    batches: tuple[Any, ...]
    options: Options
    topology: Topology
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    steps: int = 2
    depth: int | None = None
    dtype: torch.dtype = torch.float64
    seed: int = 0
    has_dropout: bool = True
    loaders: Any = None
    are_collated: bool = False

    def batches_of(self, data_rank: int) -> list[Any]:
        """The batches that one data rank trains on."""
        return list(self.batches[data_rank :: self.topology.data])


@dataclass
class RankResult:
    """What one rank of a run has left. A run in one process has one rank."""

    values: Values
    stack: str = ""
    """the name of the block stack"""
    stages: tuple[tuple[range, int], ...] = ()
    """of the layout: the blocks and the pipeline rank of each stage"""
    block_names: tuple[str, ...] = ()
    """qualified names of the stack's blocks"""
    num_microbatches: int = 1
    """of the layout"""
    draws_at: str = ""
    """the line of the step that draws random numbers, if one does; only of whole batches"""
    has_rounded: bool = False
    """whether the step computes in a lower precision in places; only of whole batches"""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankFailure:
    """Why a rank has no result."""

    rank: int
    kind: str
    """the name of the error's class"""
    message: str
    trace: str = ""
    is_refusal: bool = False
    """whether it is an error of this package, which names what can't be run"""
    is_consequence: bool = False
    """whether the rank ended because another one had failed"""


Results = list[RankResult | RankFailure]
Run = Callable[..., Results]
"""Runs `function(*arguments)` on that many ranks: `run(world_size, function, *arguments)`. `processes.run` is one."""


_OWN_PACKAGES = ("lightning.", "lightning_hanayo.")


class Taken(NamedTuple):
    """Training batches."""

    batches: tuple[Any, ...]
    loaders: Any = None
    """the containers of the loaders that each batch has a part of, with None for each loader; None if there is one"""
    are_collated: bool = False
    """whether torch's `default_collate` has made them: it decides how lists are read"""


def take_batches(module: pl.LightningModule, data: Any, count: int, dtype: torch.dtype) -> Taken:
    """The first `count` training batches, with floating-point tensors in `dtype`.

    Args:
        module: gives the loader if there are no `data`.
        data: a LightningDataModule, a loader or any iterable of batches, or None.
        count: how many are needed.
        dtype: of the batches' floating-point tensors.

    Raises:
        HanayoError: there are fewer.
    """
    found, loaders, are_made_by_torch = _batches(module, data)
    batches = tuple(cast(batch, dtype) for batch in islice(found, count))
    if not batches:
        raise HanayoError("the training loader has no batch")
    if len(batches) < count:
        needs = f"the check needs {counted(count, 'batch')} (steps x data ranks x accumulated batches)"
        raise HanayoError(f"{needs}, and the training loader has {len(batches)}; take fewer steps or smaller batches")
    return Taken(batches, loaders, are_made_by_torch)


def topology_of(options: Options, devices: int | None) -> Topology:
    """The ranks of the layout: `devices`, or what the options multiply to.

    Raises:
        HanayoError: they don't fit, or nothing says how many ranks there are.
    """
    pipe, data = options.pipeline_parallel_size, options.data_parallel_size
    if devices is None:
        given = [size for size in (pipe, data, *cube_sizes(options.cube)) if isinstance(size, int)]
        devices = prod(given)
        if pipe == "auto" and devices == 1:
            way_out = "give devices=N, or sizes to HanayoStrategy, such as pipeline_parallel_size=2"
            raise HanayoError(f"nothing says how many processes the layout has: {way_out}")
    return resolve(devices, pipeline_parallel_size=pipe, data_parallel_size=data, cube=options.cube)


def select_callbacks(callbacks: Iterable[Callback]) -> tuple[tuple[Callback, ...], tuple[str, ...]]:
    """The callbacks that a check keeps, and the names of the others.

    The user's own are kept if they can be pickled. Lightning's are left out: they write, monitor and stop.
    """
    kept, left_out = [], []
    for one in callbacks:
        name = type(one).__name__
        if type(one).__module__.startswith(_OWN_PACKAGES):
            continue
        try:
            pickle.dumps(one)
        except Exception:  # whatever its attributes raise
            left_out.append(name)
        else:
            kept.append(one)
    return tuple(kept), tuple(left_out)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The batch with all floating-point tensors in `dtype`. Containers keep their types."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    inside = children(value)
    return value if inside is None else with_children(value, {key: cast(item, dtype) for key, item in inside.items()})


def _batches(module: pl.LightningModule, data: Any) -> tuple[Iterator[Any], Any, bool]:
    if data is None:
        return _of_loaders(module.train_dataloader())
    if not isinstance(data, pl.LightningDataModule):
        return iter(data), None, are_collated([data])
    data.prepare_data()
    data.setup("fit")
    batches, *source = _of_loaders(data.train_dataloader())
    moved = (data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0) for batch in batches)
    return moved, *source


def _of_loaders(loaders: Any) -> tuple[Iterator[Any], Any, bool]:
    """The batches of a loader, or of several as Lightning combines them; and what `Taken` says of them."""
    if isinstance(loaders, (dict, list, tuple)):
        loaders = CombinedLoader(loaders, "max_size_cycle")
    if isinstance(loaders, CombinedLoader):
        shape = shape_of_loaders(loaders.iterables)
        return (batch for batch, *_ in loaders), shape, are_collated(loaders.flattened)
    return iter(loaders), None, are_collated([loaders])
