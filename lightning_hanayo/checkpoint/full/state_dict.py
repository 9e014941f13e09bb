"""Gathers the state dicts of a module and its optimizers from all ranks of a pipeline."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hanayo.checkpoint.format.state_document import WITHOUT_STATE
from lightning_hanayo.checkpoint.full.gather_tensors import gather
from lightning_hanayo.packed_values import from_bytes, is_tensor_subclass, to_bytes
from lightning_hanayo.partition.ownership import state_of_own_tensors
from lightning_hanayo.runtime.comm.transport import Transport

Change = Callable[[Tensor, Tensor], Tensor]
"""makes a full tensor from a shard; the second tensor is the parameter that it belongs to"""


class Sharding(Protocol):
    """How parameters are sharded over the ranks of a cube."""

    def unshard(self, shard: Tensor, parameter: Tensor) -> Tensor:
        """All-gather the full tensor from shards that are laid out as `parameter`. Called by all ranks of the cube."""


def gather_module_state(
    module: nn.Module, ranks: Mapping[str, int], transport: Transport, sharding: Sharding | None = None
) -> dict[str, Any]:
    """The module's full state dict on pipeline rank 0, as a single process has it; elsewhere this rank's own entries.

    All ranks of the pipeline call this; with a sharding, all ranks of the cube.

    Args:
        module: with placeholders for the parameters of other ranks.
        ranks: the pipeline rank that owns each entry.
    """
    state = module.state_dict()
    own = {name: value for name, value in state.items() if ranks[name] == transport.rank}
    if sharding is not None:
        own |= _map_parameters(module, own, sharding.unshard)
    gathered = gather(transport, {name: _sendable(value) for name, value in own.items()})
    if gathered is None:
        return own
    for entries in gathered:
        state.update({name: _received(value) for name, value in entries.items()})
    return state


def gather_optimizer_state(
    optimizer: Optimizer, transport: Transport, sharding: Sharding | None = None
) -> dict[str, Any]:
    """The optimizer's full state dict on pipeline rank 0; elsewhere this rank's own. Called by all ranks."""
    state = optimizer.state_dict()
    if _is_mock(optimizer):
        return state
    gathered = gather(transport, _own_entries(optimizer, state, sharding.unshard if sharding is not None else None))
    if gathered is not None:
        entries = {index: value for part in gathered for index, value in part.items()}
        state["state"] = dict(sorted(entries.items()))
        without = entries and [index for index in range(_num_parameters(optimizer)) if index not in entries]
        state |= {WITHOUT_STATE: without} if without else {}
    return state


def _sendable(value: Any) -> Tensor | dict[str, Tensor]:
    """A plain tensor as it is; anything else, such as an extra state, as bytes."""
    if isinstance(value, Tensor) and not is_tensor_subclass(value):
        return value
    return {"bytes": to_bytes(value)}


def _received(value: Tensor | dict[str, Tensor]) -> Any:
    return from_bytes(value["bytes"]) if isinstance(value, dict) else value


def _num_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _is_mock(optimizer: Optimizer) -> bool:
    """Whether it is Lightning's for `configure_optimizers` that returns None: without parameters and state."""
    return not optimizer.param_groups


def _map_parameters(module: nn.Module, state: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """Those entries of the module's state that are parameters, under whatever name, changed."""
    renamed = {name: one for name, one in state_of_own_tensors(module).items() if isinstance(one, nn.Parameter)}
    parameters = {**renamed, **dict(module.named_parameters(remove_duplicate=False))}
    return {name: change(state[name], parameters[name]) for name in state if name in parameters}


def _own_entries(optimizer: Optimizer, state: Mapping[str, Any], change: Change | None) -> dict[int, Any]:
    """The entries of an optimizer's state dict that belong to this rank's parameters, with changed tensors.

    Some optimizers, such as Adagrad, create entries of placeholders in their constructor.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {index: values for index, values in state["state"].items() if not parameters[index].is_meta}
    if change is None:
        return own
    return {
        index: {name: change(v, parameters[index]) if isinstance(v, Tensor) else v for name, v in values.items()}
        for index, values in own.items()
    }
