"""Puts the values of a checkpoint into a module of which this rank holds a part; each tensor is read when it is copied.

checkpoint     embedding   block 0   block 1   head        names, shapes: the single process's
rank 0         read        read      .         read        a dot is a placeholder: stays as it is
rank 1         .           .         read      .           in a cube: the rank's entries of each tensor
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_hanayo.checkpoint.format.region import Region
from lightning_hanayo.checkpoint.load.model_check import Entry, Source
from lightning_hanayo.checkpoint.load.stored_tensor import StoredTensor
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.packed_values import is_tensor_subclass

_LOW = (torch.bfloat16, torch.float16)


class Sharding(Protocol):
    """How parameters are sharded over the ranks of a cube."""

    @property
    def whole_shapes(self) -> Mapping[Tensor, tuple[int, ...]]:
        """The shapes of the parameters of which this rank holds a part."""

    def region(self, parameter: Tensor) -> Region:
        """Which entries of a parameter this rank holds."""


def entries(module: nn.Module, sharding: Sharding | None, *, has_masters: bool) -> dict[str, Entry | None]:
    """What the module's state dict has in a single process, by name; None for what is no tensor.

    Args:
        module: with placeholders for other ranks' parameters.
        sharding: of a cube.
        has_masters: whether parameters in bf16 or fp16 may be saved in fp32.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shapes = {} if sharding is None else sharding.whole_shapes
    found: dict[str, Entry | None] = {}
    for name, value in module.state_dict().items():
        parameter = parameters.get(name)
        also = torch.float32 if has_masters and parameter is not None and parameter.dtype in _LOW else None
        shape = None if parameter is None else shapes.get(parameter)
        tensor = value if parameter is None else parameter
        found[name] = Entry.of(tensor, shape, also) if isinstance(tensor, Tensor) else None
    return found


def own_values(module: nn.Module, state: Mapping[str, Any], sharding: Sharding | None) -> dict[str, Any]:
    """The state dict for this rank: its part of each value, which isn't read yet; other ranks' as they are here."""
    current = module.state_dict()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    own = {}
    for name, value in state.items():
        here = current.get(name)
        if isinstance(here, Tensor) and here.is_meta:
            own[name] = here
        elif isinstance(value, Tensor) and name in parameters:
            own[name] = own_part(value, parameters[name], sharding)
        else:
            own[name] = value
    return own


def own_part(value: Tensor, parameter: Tensor, sharding: Sharding | None) -> Tensor:
    """This rank's part, not read yet, of something that has the whole parameter's shape; anything else unchanged."""
    if sharding is None or tuple(value.shape) != sharding.whole_shapes.get(parameter):
        return value
    return StoredTensor.around(value).part(sharding.region(parameter))


def not_finite(module: nn.Module, values: Mapping[str, Any]) -> list[str]:
    """The names of the parameters that would get NaN or infinite values. Reads one tensor after another."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [
        name
        for name, value in values.items()
        if name in parameters and isinstance(value, Tensor) and not value.is_meta and not _is_finite(value)
    ]


def load(
    module: nn.Module, state: Mapping[str, Any], sharding: Sharding | None, source: Source, *, strict: bool
) -> None:
    """Copy this rank's part of a whole state dict into the module.

    Hooks that translate older names or values find whole values: the part is taken after them.

    Raises:
        CheckpointError: the module refuses them.
    """
    hooks = [
        one.register_load_state_dict_pre_hook(partial(_take_parts, sharding))  # type: ignore[no-untyped-call]
        for one in module.modules()
        if any(_is_elsewhere(tensor, sharding) for tensor in _tensors(one).values())
    ]
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        reason = " ".join(str(error).split())  # torch writes a line per problem
        raise CheckpointError(f"{source} can't be loaded into this {type(module).__name__}: {reason}") from None
    finally:
        for hook in hooks:
            hook.remove()


def _take_parts(sharding: Sharding | None, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The last hook before a module copies its values: leave what this rank has of them."""
    for name, here in _tensors(module).items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and here.is_meta:
            state[prefix + name] = here.detach()
        elif isinstance(value, Tensor) and isinstance(here, nn.Parameter):
            state[prefix + name] = own_part(value, here, sharding)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own, by name."""
    own: Any = {"recurse": False, "remove_duplicate": False}
    return {**dict(module.named_parameters(**own)), **dict(module.named_buffers(**own))}


def _is_elsewhere(tensor: Tensor, sharding: Sharding | None) -> bool:
    """Whether other ranks have it, or a part of it."""
    return tensor.is_meta or (sharding is not None and tensor in sharding.whole_shapes)


def _is_finite(value: Tensor) -> bool:
    if is_tensor_subclass(value) or not (value.is_floating_point() or value.is_complex()):
        return True
    here = value.read() if isinstance(value, StoredTensor) else value
    here = here.float() if here.itemsize == 1 else here
    total = here.sum(dtype=torch.promote_types(here.dtype, torch.float32))  # finite only if all values are
    return bool(total.isfinite()) or bool(here.isfinite().all())
