"""Lets callbacks that freeze and unfreeze parameters do the same on all ranks.

`BaseFinetuning.unfreeze_and_add_param_group` leaves out a parameter whose values equal those of one that the optimizer
has: it asks `torch.equal` for each pair.

    optimizer    head.norm.bias   (zeros)      on pipeline rank 0
    unfrozen     blocks.1.norm.bias (zeros)    on pipeline rank 1: left out, as in a single process, on both ranks

No rank may hold both, so the ranks exchange hashes of whole values when the first pair is compared.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hanayo.packed_values import stored_tensors
from lightning_hanayo.partition.parameter_guard import ParameterGuard
from lightning_hanayo.strategy.groups.on_all_ranks import on_all_ranks
from lightning_hanayo.strategy.guarded_hooks import guard_hook
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def compare_whole_parameters(
    trainer: "pl.Trainer", guard: ParameterGuard, attributes: TemporaryAttributes, cube: Cube | None
) -> None:
    """Let finetuning callbacks compare whole parameters, until `attributes` are restored. Called by all ranks."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, BaseFinetuning):
            guard_hook(callback, "finetune_function", guard, attributes)
            hook = callback.on_train_epoch_start
            attributes.set(callback, "on_train_epoch_start", partial(_hook, hook, guard, cube))


def _hook(
    hook: Callable[..., Any], guard: ParameterGuard, cube: Cube | None, trainer: "pl.Trainer", module: Any
) -> None:
    """Takes the place of the callback's hook."""
    with WholeComparison(dict(module.named_parameters()), guard, cube):
        hook(trainer, module)


class WholeComparison(TorchFunctionMode):
    """Inside it, `torch.equal` compares parameters of the model as a single process would. On all ranks alike.

    Args:
        parameters: all of the model, by name.
        guard: of the parameters.
        cube: None without one.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], guard: ParameterGuard, cube: Cube | None) -> None:
        super().__init__()
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._guard = guard
        self._cube = cube

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compare two parameters; anything else is done as without this mode."""
        if func is torch.equal and all(one in self._names for one in args):
            one, other = (self._hashes[self._names[parameter]] for parameter in args)
            return one == other
        return func(*args, **(kwargs or {}))

    @cached_property
    def _hashes(self) -> dict[str, str]:
        """Of all parameters by name, gathered from all ranks."""
        with self._guard.off():
            gathered = on_all_ranks(self._own_hashes)
        return {name: value for own in gathered for name, value in own.items()}

    def _own_hashes(self) -> dict[str, str]:
        with torch._C.DisableTorchFunction():
            return {name: self._hash(parameter) for parameter, name in self._names.items() if not parameter.is_meta}

    def _hash(self, parameter: nn.Parameter) -> str:
        """Equal for equal values. Called by all ranks of a cube, for a parameter of which each may have a part."""
        whole = parameter if self._cube is None else self._cube.unshard(parameter, parameter)
        found = hashlib.sha256(f"{parameter.dtype} {tuple(whole.shape)}".encode())
        for tensor in stored_tensors(whole):
            found.update(_bytes(tensor))
        return found.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    values = tensor.detach().cpu()
    values = values + 0 if values.is_floating_point() and values.itemsize > 1 else values  # -0.0 equals 0.0
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data
