"""The state: a module's and an optimizer's state dict, taken from all ranks of a pipeline, and given back to them."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hanayo.checkpoint.gather import gather
from lightning_hanayo.runtime.comm.transport import Transport


class Parts(Protocol):
    """Where the ranks of a cube hold parts of parameters: how these are brought together, and cut."""

    def whole(self, part: Tensor, parameter: Tensor) -> Tensor:
        """What the ranks' parts of something shaped as `parameter` make together. Called by all ranks of the cube."""

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This rank's part of something shaped as the whole parameter; anything else as it is."""


def module_state(
    module: nn.Module, ranks: Mapping[str, int], transport: Transport, parts: Parts | None = None
) -> dict[str, Any]:
    """The module's whole state dict on pipeline rank 0, as one process has it; elsewhere what this rank owns.

    Args:
        module: with placeholders for what other ranks own.
        ranks: the pipeline rank that owns each entry.
        transport: among the ranks of the pipeline, which all call this.
        parts: where this rank's values are those of a cube; all of its ranks call this.
    """
    state = module.state_dict()
    own = {name: value for name, value in state.items() if ranks[name] == transport.rank}
    if parts is not None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        own |= {name: parts.whole(own[name], parameters[name]) for name in own if name in parameters}
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    everything = gather(transport, tensors)
    if everything is None:
        return own
    for part in everything:
        state.update(part)
    return state


def load_module(module: nn.Module, state: Mapping[str, Any], parts: Parts | None = None, *, strict: bool) -> None:
    """Load a whole state dict; placeholders stay what they are."""
    own = module.state_dict()
    kept = {name: own[name] if _is_placeholder(own.get(name)) else value for name, value in state.items()}
    if parts is not None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        kept |= {name: parts.part(kept[name], parameters[name]) for name in kept if name in parameters}
    module.load_state_dict(kept, strict=strict)


def optimizer_state(optimizer: Optimizer, transport: Transport, parts: Parts | None = None) -> dict[str, Any]:
    """The optimizer's whole state dict on pipeline rank 0; elsewhere this rank's. Called by all ranks."""
    state = optimizer.state_dict()
    if _is_stand_in(optimizer):
        return state
    own = _own(optimizer, state["state"])
    everything = gather(transport, own if parts is None else _each(optimizer, own, parts.whole))
    if everything is not None:
        found = {index: value for part in everything for index, value in part.items()}
        state["state"] = dict(sorted(found.items()))
    return state


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], parts: Parts | None = None) -> None:
    """Load a whole state dict, without what belongs to placeholders."""
    if _is_stand_in(optimizer):
        optimizer.load_state_dict(dict(state))
        return
    own = _own(optimizer, state["state"])
    own = own if parts is None else _each(optimizer, own, parts.part)
    optimizer.load_state_dict({**state, "state": own})


def _is_stand_in(optimizer: Optimizer) -> bool:
    """Lightning's, where `configure_optimizers` returns None: it has no parameters, and nothing in its state dict."""
    return not optimizer.param_groups


def _each(
    optimizer: Optimizer, state: Mapping[int, Any], change: Callable[[Tensor, Tensor], Tensor]
) -> dict[int, dict[str, Any]]:
    """`state` with every tensor in it changed, as one that belongs to its parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        index: {
            name: change(value, parameters[index]) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for index, values in state.items()
    }


def _own(optimizer: Optimizer, state: Mapping[int, Any]) -> dict[int, Any]:
    """`state` without what belongs to placeholders: some optimizers, as Adagrad, make it when they are constructed."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: value for index, value in state.items() if not parameters[index].is_meta}


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
