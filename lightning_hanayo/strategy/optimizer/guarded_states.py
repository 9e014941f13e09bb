"""Optimizer states as user code sees them: each rank has those of its own parameters, or its parts of them.

Hooks can't use them, as no rank has those of all parameters. Optimizers find their plain states when they step: while
user code runs, and only then, `optimizer.state` is a `RefusedStates`. Hooks that save or load a checkpoint get this
rank's states; those that are cut, in a cube or with shard_optimizer=True, refuse operations that need the whole.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hanayo.dist_checkpointing.load_state import Sharding
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import Part, own_shape, partial_alias
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards

_WAY_OUT = (
    "Optimizer states are on the ranks that update their parameters. Change each in place by numbers and by states of "
    "its own parameter, in a hook that runs on all ranks; trainer.save_checkpoint(path) writes all of them"
)


def as_parts(state: Mapping[Any, Any], parameter: Tensor, name: str, sharding: Sharding | None) -> dict[Any, Any]:
    """The states of one of this rank's parameters; cut ones refuse operations that would be wrong on a part."""
    if sharding is None or parameter not in sharding.whole_shapes:
        return dict(state)
    whole, shape, is_of_data_rank = sharding.whole_shapes[parameter], own_shape(parameter), False
    if isinstance(sharding, OptimizerShards):
        shape, is_of_data_rank = sharding.local_shape(parameter), parameter in sharding
    return {
        key: partial_alias(value, Part(name, whole, is_of_data_rank, f"the optimizer's {key} of ", _WAY_OUT))
        if isinstance(value, Tensor) and own_shape(value) == shape
        else value
        for key, value in state.items()
    }


@dataclass(eq=False)
class RefusedStates(MutableMapping[Any, Any]):
    """Takes the place of `optimizer.state` between `enter` and `leave`: no user code may use the states."""

    optimizer: Optimizer
    """torch's, not Lightning's"""

    def __post_init__(self) -> None:
        self._own: Any = self.optimizer.state

    def enter(self) -> None:
        """User code begins, or goes on."""
        if self.optimizer.state is not self:
            self._own, self.optimizer.state = self.optimizer.state, self  # type: ignore[assignment]

    def leave(self) -> None:
        """User code has ended.

        Raises:
            UnsupportedError: it has loaded other states.
        """
        left: Any = self.optimizer.state
        self.optimizer.state = self._own
        if left is not self and left is not self._own:
            self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(
            f"each rank has the states of {type(self.optimizer).__name__} for its own parameters, or parts of them: "
            "optimizer.state can't be used here. trainer.save_checkpoint(path) on all ranks writes all of them."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse
