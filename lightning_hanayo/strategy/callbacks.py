"""Lightning's callbacks that average, copy or freeze parameters, of which each rank has its own.

Averages: a callback copies the whole module by `deepcopy(module).to(device)`, before it is cut. The copy is cut like
the module, and the two are computed with parameter by parameter. It is stored in checkpoints like the module.

                       rank 0                    rank 1
    module             embedding, block 0  .     .  .  block 1       a dot is a placeholder
    callback's copy    embedding, block 0  .     .  .  block 1       in a cube: the same parts of each parameter

A module that an earlier run has cut, or that is on the meta device, is copied as it is: placeholders stay such.

Finetuning: `BaseFinetuning.unfreeze_and_add_param_group` leaves out a parameter whose values equal those of one that
the optimizer has, and asks `torch.equal` for each pair. No rank may hold both, so the ranks exchange hashes of whole
values when the first pair is compared.

    optimizer    head.norm.bias   (zeros)      on pipeline rank 0
    unfrozen     blocks.1.norm.bias (zeros)    on pipeline rank 1: left out, as in a single process, on both ranks
"""

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache, partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing.load_state import Source
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.packed_values import stored_tensors
from lightning_hanayo.partition import guards
from lightning_hanayo.partition.guards import ParameterGuard
from lightning_hanayo.partition.ownership import Placeholder, exchange
from lightning_hanayo.strategy.checkpoints.load import KeptValues
from lightning_hanayo.strategy.guarded_hooks import guard_hook
from lightning_hanayo.strategy.joining import on_all_ranks
from lightning_hanayo.strategy.lightning import user_hooks
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.setup.prepared_model import Cube

StateOf = Callable[[nn.Module, Cube | None], dict[str, Any]]
"""returns the state that is saved of a cut module, given how its parameters are sharded over a cube"""


class Averages:
    """The copies of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._copies: dict[nn.Module, _Copy] = {}
        self._loaded: dict[nn.Module, KeptValues] = {}

    def adapt_callbacks(self) -> None:
        """Let callbacks copy and load a module that ranks hold parts of, for the time of the run."""
        attributes = self._run.attributes
        for callback in user_hooks.averaging_callbacks(self._run.trainer):
            attributes.wrap(callback, "setup", _set_up)
            for name in ("on_load_checkpoint", "load_state_dict"):
                attributes.wrap(callback, name, self._load)

    def loaded(self, module: nn.Module) -> KeptValues | None:
        """The values that a callback has loaded into the module before it was cut; None without any."""
        return self._loaded.pop(module, None)

    def cut(self, state_of: StateOf) -> None:
        """Cut the copies as the module was cut, whether they are whole or of an earlier run. Called by all ranks.

        Raises:
            UnsupportedError: a copy isn't like the module.
            CheckpointError: it can't take the values that were loaded into it.
        """
        module, cube = self._run.module, self._run.cube
        for callback, copy in user_hooks.averaged_copies(self._run.trainer).items():
            guards.release(copy)
            _check_alike(type(callback).__name__, copy, module)
            with torch.no_grad():
                for parameter, original in zip(copy.parameters(), module.parameters(), strict=True):
                    exchange(parameter, _own_part(parameter, original, cube))
            for copied, own in zip(copy.modules(), module.modules(), strict=True):
                buffers = {name: one for name, one in own._buffers.items() if one is not None and one.is_meta}
                copied._buffers.update({name: deepcopy(buffer) for name, buffer in buffers.items()})
            self._copies[copy] = _Copy(copy, module, cube, state_of)
        self._put_in()

    def close(self) -> None:
        """The run has ended: nothing but the callbacks' next run may compute with parts."""
        for one in self._copies.values():
            one.close()
        self._copies.clear()

    def _load(self, hook: Callable[..., Any], *args: Any) -> None:
        """Takes the place of a hook that loads whole values into module and copies: each rank reads its part."""
        module, trainer = self._run.module, self._run.trainer
        copies, models = user_hooks.averaged_copies(trainer), user_hooks.averaging_models(trainer)
        with TemporaryAttributes() as attributes:
            for one in (module, *copies.values()):
                attributes.set(one, "load_state_dict", partial(self._keep, one))
            for callback, model in models.items():
                if model is not copies[callback]:
                    attributes.set(model, "load_state_dict", partial(self._keep_averaged, model, copies[callback]))
            hook(*args)
        if self._copies:
            self._put_in()
            if module in self._loaded:
                self._loaded.pop(module).put_in(module, self._run.cube)

    def _keep(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True, **_: Any) -> None:
        self._loaded[module] = KeptValues(module, state, Source("The checkpoint"), self._run.options, strict=strict)

    def _keep_averaged(self, model: nn.Module, copy: nn.Module, state: Mapping[str, Any], **_: Any) -> None:
        for name, buffer in model.named_buffers(recurse=False):
            buffer.copy_(state[name])
        inner = {name.removeprefix("module."): one for name, one in state.items() if name.startswith("module.")}
        self._keep(copy, inner)

    def _put_in(self) -> None:
        for copy, one in self._copies.items():
            if copy in self._loaded:
                one.load(self._loaded.pop(copy))


class _Copy:
    """A copy that has been cut."""

    def __init__(self, copy: nn.Module, module: nn.Module, cube: Cube | None, state_of: StateOf) -> None:
        self._copy = copy
        pairs: dict[Tensor, nn.Parameter] = dict(zip(copy.parameters(), module.parameters(), strict=True))
        self._cube = cube
        if cube is not None:
            cube.shards.update({one: cube.shards[own] for one, own in pairs.items() if own in cube.shards})
        self._state_of = state_of
        self._is_used = False
        """whether `state_dict()` returns this rank's part"""
        whole = {} if cube is None else cube.whole_shapes
        self._partial: list[Any] = [one for one, own in pairs.items() if isinstance(own, Placeholder) or own in whole]
        for parameter in self._partial:
            vars(parameter).update(vars(pairs[parameter]))
        self._hook = copy.register_state_dict_post_hook(partial(self._give_state))

    def load(self, values: KeptValues) -> None:
        """Read this rank's part of whole values. Called by all ranks."""
        with TemporaryAttributes() as attributes:
            attributes.set(self, "_is_used", True)
            values.check(self._copy, self._cube)
            values.put_in(self._copy, self._cube)

    def close(self) -> None:
        """Refuse from now on to compute with parts."""
        self._hook.remove()
        guards.guard(self._partial)
        if self._cube is not None:
            for copied in self._copy.parameters():
                self._cube.shards.pop(copied, None)

    def _give_state(self, copy: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Called at the end of `copy.state_dict()`: user code gets the same as a checkpoint."""
        if self._is_used:
            return
        with TemporaryAttributes() as attributes:
            attributes.set(self, "_is_used", True)
            found = self._state_of(copy, self._cube)
        state.update({f"{prefix}{name}": value for name, value in found.items()})


def _check_alike(callback: str, copy: nn.Module, module: nn.Module) -> None:
    """The callbacks pair parameters and buffers by their places."""
    for kind in ("named_parameters", "named_buffers"):
        names, expected = ([name for name, _ in getattr(one, kind)()] for one in (copy, module))
        if names != expected:
            different = ", ".join(sorted(set(names) ^ set(expected))[:3]) or "this order of names"
            raise UnsupportedError(
                f"{callback} has a copy of {type(module).__name__} from before it was changed: only one has "
                f"{different}. Build all of it in __init__; for EMAWeightAveraging, configure_model would do, too."
            )


def _own_part(copied: nn.Parameter, own: nn.Parameter, cube: Cube | None) -> nn.Parameter:
    """This rank's part of a copied parameter."""
    if isinstance(own, Placeholder):
        return deepcopy(own)
    if copied.is_meta:  # built without values: it had none when the copy was made
        return nn.Parameter(own.detach().clone(), copied.requires_grad)
    if cube is None or copied.shape == own.shape:
        return copied
    return nn.Parameter(cube.shard(copied.detach(), own).clone(), copied.requires_grad)


def _set_up(hook: Callable[..., Any], trainer: "pl.Trainer", module: Any, *args: Any, **kwargs: Any) -> None:
    """Takes the place of the callback's `setup`. A method of the module is its copy's in the copy."""
    with TemporaryAttributes() as attributes, guards.released(module):
        attributes.set(module, "to", MethodType(_move, module))
        hook(trainer, module, *args, **kwargs)
    for copy in user_hooks.averaged_copies(trainer).values():
        vars(copy).pop("to", None)


def _move(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(*args, **kwargs))


def compare_whole_parameters(run: Run, cube: Cube | None) -> None:
    """Let finetuning callbacks compare whole parameters, for the time of a run. Called by all ranks."""

    def compare_whole(hook: Callable[..., Any], trainer: "pl.Trainer", module: Any) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        equal, hashes = torch.equal, cache(lambda: _hashes(names, run.guard, cube))

        def equal_if_whole(one: Tensor, other: Tensor) -> bool:
            if one not in names or other not in names:
                return equal(one, other)
            return hashes()[names[one]] == hashes()[names[other]]

        with TemporaryAttributes() as attributes:
            attributes.set(torch, "equal", equal_if_whole)
            hook(trainer, module)

    for callback in user_hooks.callbacks_of(run.trainer):
        if isinstance(callback, BaseFinetuning):
            guard_hook(run, callback, "finetune_function")
            run.attributes.wrap(callback, "on_train_epoch_start", compare_whole)


def _hashes(names: Mapping[nn.Parameter, str], guard: ParameterGuard, cube: Cube | None) -> dict[str, str]:
    """By the names of all parameters, equal for equal values. Called by all ranks, each of which may have parts."""

    def of(parameter: nn.Parameter) -> str:
        whole = parameter if cube is None else cube.unshard(parameter, parameter)
        found = hashlib.sha256(f"{parameter.dtype} {tuple(whole.shape)}".encode())
        for tensor in stored_tensors(whole):
            values = tensor.detach().cpu()
            values = values + 0 if values.is_floating_point() and values.itemsize > 1 else values  # -0.0 equals 0.0
            found.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    own = {name: parameter for parameter, name in names.items() if not parameter.is_meta}
    with guard.off():
        gathered = on_all_ranks(lambda: {name: of(parameter) for name, parameter in own.items()})
    return {name: value for hashes in gathered for name, value in hashes.items()}
