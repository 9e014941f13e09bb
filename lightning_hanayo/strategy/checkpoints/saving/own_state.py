"""What a rank gives Lightning of the state of model and optimizers, when a checkpoint is a folder.

rank 0                                              rank 1, of the same pipeline
    "embedding.weight"   a tensor                       "embedding.weight"   without values
    "blocks.0.weight"    a tensor, or its part          "blocks.0.weight"    without values
    "blocks.1.weight"    without values                 "blocks.1.weight"    a tensor, or its part

Every rank has all names, so that a hook that deletes or renames entries does the same on all of them. A part, in a
cube, keeps the name of its parameter through copies, and refuses what would be wrong on parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hanayo.checkpoint.full.state_dict import numbered_state_dict
from lightning_hanayo.checkpoint.load.module_state import Sharding
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import Part, PartialParameter
from lightning_hanayo.partition.missing_values import Owner, without_values
from lightning_hanayo.strategy.optimizer.guarded_states import as_parts
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards
from lightning_hanayo.strategy.setup.cube import Cube

_WAY_OUT = (
    "Each rank saves what it holds: delete, rename, copy or convert entries, or save one file with "
    "HanayoStrategy(save_full=True)"
)


def module_state(
    module: nn.Module, sharding: Sharding | None, ranks: Mapping[str, int], device: torch.device
) -> dict[str, Any]:
    """The module's state dict on this rank. Its parameters are this rank's, and not guarded.

    Args:
        module: cut into stages.
        sharding: of the parameters as they are now; None if they are whole.
        ranks: the pipeline rank that owns each entry.
        device: of each rank's values.
    """
    with nullcontext() if sharding is None else _guarded_parts(module, sharding):
        state = module.state_dict()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            state[name] = without_values(value, Owner(name, ranks.get(name, 0), device, _WAY_OUT))
    return state


@contextmanager
def _guarded_parts(module: nn.Module, sharding: Sharding) -> Iterator[None]:
    """Inside it, what hooks of modules make of a part is a part, too, under whatever name, or is refused."""
    shapes = sharding.whole_shapes
    parts = [(name, one) for name, one in module.named_parameters() if one in shapes]
    classes, parts_before = [type(one) for _, one in parts], [vars(one).get("_part") for _, one in parts]
    for name, one in parts:
        vars(one)["_part"] = Part(name, shapes[one], _is_of_data_rank(sharding, one))
        one.__class__ = PartialParameter
    try:
        yield
    finally:
        for (_, one), own_class, before in zip(parts, classes, parts_before, strict=True):
            one.__class__ = own_class
            vars(one)["_part"] = before


def optimizer_state(
    optimizer: Optimizer, names: Mapping[Tensor, str], sharding: Cube | OptimizerShards | None
) -> dict[str, Any]:
    """The optimizer's state dict on this rank: with the states of its own parameters. They are not guarded.

    Args:
        optimizer: torch's, not Lightning's.
        names: of the module's parameters.
        sharding: of the states; None if they are whole.

    Raises:
        UnsupportedError: a parameter isn't one of the module's, or it isn't known which states are whose.
    """
    state = numbered_state_dict(optimizer, is_cut=sharding is not None or any(parameter.is_meta for parameter in names))
    parameters = parameters_of(optimizer)
    if not parameters:  # Lightning's, for `configure_optimizers` that returns None
        return state
    listed = names_of(parameters, names)
    own = {}
    for index, values in state["state"].items():
        parameter = parameters[index]
        if not parameter.is_meta:  # some, such as Adagrad, make states of placeholders in their constructor
            own[index] = as_parts(values, parameter, listed[index], sharding)
    return {**state, "state": own}


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters, in the order in which its state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(parameters: Sequence[nn.Parameter], names: Mapping[Tensor, str]) -> list[str]:
    """The names of an optimizer's parameters.

    Raises:
        UnsupportedError: one has none.
    """
    if strange := [parameter for parameter in parameters if parameter not in names]:
        raise UnsupportedError(
            f"the optimizer has a parameter of the shape {tuple(strange[0].shape)} that isn't one of the module's, so "
            f"that a checkpoint has no name for it. Make it a parameter of the module."
        )
    return [names[parameter] for parameter in parameters]


def _is_of_data_rank(sharding: Any, parameter: Tensor) -> bool:
    return isinstance(sharding, OptimizerShards) and parameter in sharding
