"""What is checked: the user's module, batches and options, as all runs get them; and what a rank of a run returns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback

from lightning_hanayo.checking.comparison import Values
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.topology import Topology


@dataclass(frozen=True)
class TrainerOptions:
    """The Trainer's options that change the training."""

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


@dataclass(frozen=True)
class Stage:
    """Where a stage's blocks are."""

    blocks: range
    pipe_rank: int


@dataclass
class RankResult:
    """What one rank of a run has left. A run in one process has one rank."""

    values: Values
    stack: str = ""
    """the name of the block stack"""
    stages: tuple[Stage, ...] = ()
    """of the layout"""
    num_microbatches: int = 1
    """of the layout"""
    forward_order: tuple[str, ...] = ()
    """names of parameters, as the forward uses them; only of one process"""
    changed_attributes: tuple[str, ...] = ()
    """attributes of modules that the step has changed, such as `blocks.0.aux_loss`; only of one process"""
    draws_numbers: bool = False
    """whether the step has drawn random numbers; only of one process"""
    has_rounded: bool = False
    """whether the step computes in a lower precision in places; only of one process"""
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
