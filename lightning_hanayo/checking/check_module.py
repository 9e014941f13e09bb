"""`check`: proves that a module trains on a layout as it does in one process, or says what differs first."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback

from lightning_hanayo.checking import trainings
from lightning_hanayo.checking.case import Case, TrainerOptions, select_callbacks, take_batches, topology_of
from lightning_hanayo.checking.examine import Tell, Verdict, examine
from lightning_hanayo.checking.trainings import prepare
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.partition.stack import is_ambiguous
from lightning_hanayo.strategy import HanayoStrategy
from lightning_hanayo.strategy.lightning.user_hooks import defines_configure_model
from lightning_hanayo.strategy.setup.plan import plan_model
from lightning_hanayo.strategy.uncut_step import called_stacks


def check(
    module: pl.LightningModule,
    data: Any = None,
    strategy: HanayoStrategy | None = None,
    *,
    devices: int | None = None,
    steps: int = 2,
    depth: int | None = None,
    dtype: torch.dtype = torch.float64,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    callbacks: Iterable[Callback] = (),
    seed: int = 0,
    timeout: float = 600.0,
    tell: Tell = lambda _: None,
) -> Verdict:
    """Train copies of `module` a few steps in one process and on a layout, on CPUs, and compare everything by name.

    Example:
        >>> verdict = check(GPT(), TextData(), HanayoStrategy(pipeline_parallel_size=4, num_microbatches=8), steps=2)
        >>> print(verdict.summary)
        the layout is exact (largest difference 3e-16)

    Args:
        module: any LightningModule. It stays as it is.
        data: a LightningDataModule, a loader or another iterable of batches; None: the module's own training loader.
            Its first batches are taken once, here: batch i of data rank r is number i * D + r.
        strategy: whose options say what the layout is; None: `HanayoStrategy()`.
        devices: the number of processes; None: what the strategy's sizes multiply to.
        steps: optimizer steps.
        depth: keep the first blocks of the stack only; None: all of them. Each stage needs one.
        dtype: torch.float64, or torch.float32 with tolerances of 1e-5 to 1e-3 instead of 1e-9.
        accumulate_grad_batches, gradient_clip_val, gradient_clip_algorithm: as the Trainer's.
        callbacks: the Trainer's. Lightning's own are left out: they write, monitor and stop.
        seed: of all random numbers, and of what `configure_model` builds.
        timeout: seconds after which a run counts as failed.
        tell: is called with a line of text before each run.

    Returns:
        The verdict; `verdict.exit_code` is 0 if everything is equal.

    Raises:
        HanayoError: bad arguments, or a module that doesn't train in one process either.
    """
    if steps < 1 or accumulate_grad_batches < 1:
        raise HanayoError(f"steps={steps}, accumulate_grad_batches={accumulate_grad_batches}: expected 1 or more")
    if depth is not None and depth < 1:
        raise HanayoError(f"depth={depth}: expected a whole number of at least 1, or None")
    if not 0 < timeout < inf:
        raise HanayoError(f"timeout={timeout}: expected a number of seconds above 0")
    if not isinstance(strategy, HanayoStrategy | None):
        raise HanayoError(f"strategy={strategy!r}: expected a HanayoStrategy")
    if dtype not in (torch.float64, torch.float32):
        raise HanayoError(f"dtype={dtype}: expected torch.float64 or torch.float32")
    options = replace((strategy or HanayoStrategy()).options, master_weights=None)  # it trains in `dtype`
    topology = topology_of(options, devices)
    if depth is not None and not isinstance(options.balance, str):
        options = replace(options, balance=tuple(options.balance)[:depth])
    kept, left_out = select_callbacks(callbacks)
    trainer = TrainerOptions(accumulate_grad_batches, gradient_clip_val, gradient_clip_algorithm, kept)
    taken = take_batches(module, data, steps * topology.data * accumulate_grad_batches, dtype)
    if (
        options.stack is None
        and topology.replica_size > 1
        and (defines_configure_model(module) or is_ambiguous(module))
        and (names := called_stacks(module, lambda: taken.batches[0]))
        and (depth is None or ":" not in names[0])  # which counts the blocks in a row
    ):
        options = replace(options, blocks=names[0])  # of the one process, too
    case = Case(
        _copied(module), taken.batches, options, topology, trainer, steps, depth, dtype, seed,
        loaders=taken.loaders, are_collated=taken.are_collated,
    )  # fmt: skip
    if not defines_configure_model(module):
        prepare(case, whole=False)
        try:
            plan_model(case.module, options, topology, steady=False, is_converted=False)
        except UnsupportedError as error:
            return Verdict("refused", f"refused: {error}")
    notes = tuple(f"the callback {name} was left out: it can't be pickled" for name in left_out)
    return examine(case, partial(trainings.run, timeout=timeout), tell, notes)


def _copied(module: pl.LightningModule) -> pl.LightningModule:
    """A copy without the Trainer that an earlier run has attached."""
    try:
        memo: dict[int, Any] = {id(module.trainer): None}
    except RuntimeError:  # Lightning's: there is none
        memo = {}
    try:
        return deepcopy(module, memo)
    except Exception as error:  # whatever its attributes raise
        raise HanayoError(f"{type(module).__name__} can't be copied, which a check needs: {error}") from error
