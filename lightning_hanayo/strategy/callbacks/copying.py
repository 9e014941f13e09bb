"""Lets callbacks copy a module that an earlier run has cut, or that has no values yet, on the meta device.

    module    embedding   .   (a placeholder)   block 1 (a part, guarded since the run before)
    copy      embedding   .                     block 1

A callback calls `deepcopy(module).to(device)`: what has no values is copied, and stays where it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_hanayo.partition import after_run
from lightning_hanayo.strategy.lightning.user_hooks import averaged_copies, averaging_callbacks
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def let_callbacks_copy(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Adapt the `setup` of averaging callbacks, until `attributes` are restored. Called before they are set up."""
    for callback in averaging_callbacks(trainer):
        attributes.set(callback, "setup", partial(_set_up, callback.setup))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside it, an instance has another attribute, past its `__setattr__`."""
    attributes = TemporaryAttributes()
    attributes.set(owner, name, value)
    try:
        yield
    finally:
        attributes.restore()


def _set_up(hook: Callable[..., Any], trainer: "pl.Trainer", module: Any, *args: Any, **kwargs: Any) -> None:
    """Takes the place of the callback's `setup`. A method of the module is its copy's in the copy."""
    with replaced(module, "to", MethodType(_move, module)), after_run.released(module):
        hook(trainer, module, *args, **kwargs)
    for copy in averaged_copies(trainer).values():
        vars(copy).pop("to", None)


def _move(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(*args, **kwargs)

    module._apply(move)
    return module
