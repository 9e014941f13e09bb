"""The state: a module's and an optimizer's state dict, taken from all ranks of a pipeline, and given back to them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hanayo.checkpoint.gather import gather
from lightning_hanayo.runtime.transport import Transport


def module_state(module: nn.Module, ranks: Mapping[str, int], transport: Transport) -> dict[str, Any]:
    """The module's whole state dict on pipeline rank 0, as one process has it; elsewhere what this rank owns.

    Args:
        module: with placeholders for what other ranks own.
        ranks: the pipeline rank that owns each entry.
        transport: among the ranks of the pipeline, which all call this.
    """
    state = module.state_dict()
    own = {name: value for name, value in state.items() if ranks[name] == transport.rank}
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    everything = gather(transport, tensors)
    if everything is None:
        return own
    for part in everything:
        state.update(part)
    return state


def load_module(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load a whole state dict; placeholders stay what they are."""
    own = module.state_dict()
    kept = {name: own[name] if _is_placeholder(own.get(name)) else value for name, value in state.items()}
    module.load_state_dict(kept, strict=strict)


def optimizer_state(optimizer: Optimizer, transport: Transport) -> dict[str, Any]:
    """The optimizer's whole state dict on pipeline rank 0; elsewhere this rank's. Called by all ranks."""
    state = optimizer.state_dict()
    everything = gather(transport, _own(optimizer, state["state"]))
    if everything is not None:
        found = {index: value for part in everything for index, value in part.items()}
        state["state"] = dict(sorted(found.items()))
    return state


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a whole state dict, without what belongs to placeholders."""
    optimizer.load_state_dict({**state, "state": _own(optimizer, state["state"])})


def _own(optimizer: Optimizer, state: Mapping[int, Any]) -> dict[int, Any]:
    """`state` without what belongs to placeholders: some optimizers, as Adagrad, make it when they are constructed."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: value for index, value in state.items() if not parameters[index].is_meta}


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
