"""Prepares a copy of the user's module for a run: fewer blocks, another precision, dropout switched off."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_hanayo.checking.case import Case
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partition.deferred_init import DeferredInit, is_deferred
from lightning_hanayo.partition.stack import find_stack
from lightning_hanayo.strategy.lightning.user_hooks import defines_configure_model
from lightning_hanayo.strategy.setup.initial_values import fill_initial_values
from lightning_hanayo.strategy.setup.pretrained import load_pretrained, plan_pretrained

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth")
"""attributes of a module or its config that say how many blocks there are"""


def prepare(case: Case, *, whole: bool) -> pl.LightningModule:
    """Prepare the case's module in place: now, or as soon as its `configure_model` has built it.

    With `whole`, a module that was built on the meta device gets the values that the ranks of a layout give it.
    """
    module = case.module
    if defines_configure_model(module):
        on_meta = bool(case.options.init_folders)  # as with the strategy
        _after_configure_model(module, lambda: _prepare(module, case, whole), on_meta=on_meta)
    else:
        _prepare(module, case, whole)
    return module


def shrink(module: nn.Module, blocks: str | None, depth: int) -> None:
    """Keep the first `depth` blocks of the stack, and correct the counts of them in configs and modules around it.

    Raises:
        HanayoError: there are fewer, or less than two are left.
    """
    stack = find_stack(module, blocks)
    before = len(stack)
    if not 2 <= depth <= before:  # a single module isn't found as a stack
        raise HanayoError(f"depth={depth}: expected 2 to {before}, the blocks of {stack.name}")
    path = stack.block_names[0].split(".")[:-1]
    for name in reversed(stack.block_names[depth:]):
        container, _, key = name.rpartition(".")
        parent: Any = module.get_submodule(container)
        del parent[list(parent._modules).index(key)]
    for length in range(len(path)):
        _correct_counts(module.get_submodule(".".join(path[:length])), before, depth)


def switch_dropout_off(module: nn.Module) -> bool:
    """Set the probabilities of all dropout to zero; returns whether any was positive.

    They are `p` of torch's dropout modules, and every number between 0 and 1 whose name contains "drop".
    """
    found = False
    for part in module.modules():
        is_dropout = isinstance(part, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(part).items()):
            named_so = "drop" in name or (is_dropout and name == "p")
            if named_so and isinstance(value, float) and 0.0 < value <= 1.0:
                setattr(part, name, 0.0)
                found = True
    return found


def _prepare(module: pl.LightningModule, case: Case, whole: bool) -> None:
    if case.depth is not None and len(find_stack(module, case.options.blocks)) != case.depth:
        shrink(module, case.options.blocks, case.depth)
    if not case.has_dropout:
        switch_dropout_off(module)
    module.double() if case.dtype == torch.float64 else module.to(case.dtype)
    if whole:
        _give_values(module, case)


def _give_values(module: pl.LightningModule, case: Case) -> None:
    """Give the module in this process what all ranks of a layout together get."""
    deferred = DeferredInit(module, case.seed) if is_deferred(module) else None
    if case.options.init_folders:
        plans = plan_pretrained(module, find_stack(module, case.options.blocks).name, case.options.init_folders)
        load_pretrained(plans, module, module.modules(), deferred, torch.device("cpu"), None)
    if deferred is not None:
        fill_initial_values(deferred, module.modules(), torch.device("cpu"), None)


def _after_configure_model(module: pl.LightningModule, then: Callable[[], None], *, on_meta: bool) -> None:
    configure = module.configure_model

    @wraps(configure)
    def configure_model() -> None:
        with torch.device("meta") if on_meta else nullcontext():
            configure()
        then()

    object.__setattr__(module, "configure_model", configure_model)


def _correct_counts(module: nn.Module, before: int, after: int) -> None:
    for holder in (module, getattr(module, "config", None)):
        values = getattr(holder, "__dict__", {})
        for name, value in list(values.items()):
            if name in _COUNTS and value == before:
                setattr(holder, name, after)
            elif holder is not module and isinstance(value, list) and len(value) == before:
                setattr(holder, name, value[:after])  # one entry per block, as the types of attention of Gemma
