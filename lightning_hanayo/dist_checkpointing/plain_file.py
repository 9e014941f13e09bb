"""Gathers the state dicts of a module and its optimizers from all ranks of a pipeline."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_hanayo.checkpoint.format.state_document import WITHOUT_STATE
from lightning_hanayo.checkpoint.full.gather_tensors import gather
from lightning_hanayo.errors import UnsupportedError
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
    module: nn.Module,
    ranks: Mapping[str, int],
    transport: Transport,
    sharding: Sharding | None = None,
    *,
    gathers: bool = True,
) -> dict[str, Any]:
    """The module's full state dict on pipeline rank 0, as a single process has it; elsewhere this rank's own entries.

    All ranks of the pipeline call this; with a sharding, all ranks that it is over.

    Args:
        module: with placeholders for the parameters of other ranks.
        ranks: the pipeline rank that owns each entry.
        transport: to the ranks of the pipeline.
        sharding: of the parameters; None if they are whole.
        gathers: False if another pipeline is the one whose rank 0 gets the state, and this one only gives its shards.
    """
    state = module.state_dict()
    own = {name: value for name, value in state.items() if ranks[name] == transport.rank}
    if sharding is not None:
        own |= _map_parameters(module, own, sharding.unshard)
    if not gathers:
        return state
    gathered = gather(transport, {name: _sendable(value) for name, value in own.items()})
    if gathered is None:
        return own
    for entries in gathered:
        state.update({name: _received(value) for name, value in entries.items()})
    return state


def gather_optimizer_state(
    optimizer: Optimizer, transport: Transport, sharding: Sharding | None = None, *, gathers: bool = True
) -> dict[str, Any]:
    """The optimizer's full state dict on pipeline rank 0; elsewhere this rank's own. Called by all ranks.

    Arguments as for `gather_module_state`.

    Raises:
        UnsupportedError: it isn't known which states are whose.
    """
    state = numbered_state_dict(optimizer, is_cut=transport.num_ranks > 1 or sharding is not None)
    if not optimizer.param_groups:  # Lightning's, for `configure_optimizers` that returns None
        return state
    own = _own_entries(optimizer, state, sharding.unshard if sharding is not None else None)
    if not gathers:
        return state
    gathered = gather(transport, own)
    if gathered is not None:
        entries = {index: value for part in gathered for index, value in part.items()}
        state["state"] = dict(sorted(entries.items()))
        without = entries and [index for index in range(_num_parameters(optimizer)) if index not in entries]
        state |= {WITHOUT_STATE: without} if without else {}
    return state


def numbered_state_dict(optimizer: Optimizer, *, is_cut: bool) -> dict[str, Any]:
    """The optimizer's `state_dict()` on this rank, in which states have the numbers of their parameters.

    Args:
        optimizer: torch's, not Lightning's.
        is_cut: whether ranks have different parameters, or parts of them.

    Raises:
        UnsupportedError: states have other keys; or there are tensors next to them, such as the states of an optimizer
            inside this one, of which only rank 0's would be saved.
    """
    state: dict[str, Any] = optimizer.state_dict()
    if not optimizer.param_groups:
        return state
    name, number = type(optimizer).__name__, _num_parameters(optimizer)
    lacking = [key for key in ("state", "param_groups") if key not in state]
    strange = [key for key in state.get("state", ()) if not isinstance(key, int) or key >= number]
    if lacking or strange:
        what = f"lacks {lacking[0]!r}" if lacking else f"has {strange[0]!r} where torch's have numbers of parameters"
        raise UnsupportedError(
            f"the state_dict() of {name} {what}, so that it isn't known which rank's states are whose. Let it return "
            f"what torch's do: an optimizer around several can share its states with them (one.state = self.state). Or "
            f"save weights alone, with save_weights_only=True."
        )
    apart = [{key: value for key, value in state.items() if key not in ("state", "param_groups")}]
    apart += [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    lost = [key for entries in apart for key, value in entries.items() if _has_tensors(value)] if is_cut else []
    if lost:
        raise UnsupportedError(
            f"the state_dict() of {name} has tensors under {lost[0]!r}, next to those of each parameter: "
            f"each rank has those of its own parameters, and only rank 0's would be saved. Keep them in "
            f"self.state[parameter]; an optimizer around another can save the inner one's state_dict(), with values of "
            f"its own in inner.state[parameter]. Or save weights alone, with save_weights_only=True."
        )
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


def _has_tensors(tree: Any) -> bool:
    """Whether there is a tensor of several elements; one of a single element is a number, such as a learning rate."""
    return any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(tree))


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
