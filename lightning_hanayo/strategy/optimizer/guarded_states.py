"""Optimizer states as user code sees them: each rank has those of its own parameters, or its parts of them.

    optimizer.state[p]["exp_avg"]     of this rank's p    of another pipeline rank's p    of a p that is cut
        .mul_(0.1)                    done                nothing: its rank does it       done, on this rank's part
        .norm()                       a number            a `MissingValues`               refused

They are cut in a cube, and with shard_optimizer=True. Optimizers find their plain states when they step: while user
code runs, and only then, `optimizer.state` is a `GuardedStates`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hanayo.dist_checkpointing.load_state import Sharding
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import Part, PartialValues, own_shape, partial_alias, plain_alias
from lightning_hanayo.partition import guards
from lightning_hanayo.partition.ownership import Placeholder
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards

_WAY_OUT = (
    "Optimizer states are on the ranks that update their parameters. Change each in place by numbers and by states of "
    "its own parameter, in a hook that runs on all ranks; trainer.save_checkpoint(path) writes all of them"
)


def local_shape(parameter: Tensor, sharding: Sharding | None) -> tuple[int, ...]:
    """The shape of a state of the parameter on this rank, if it has one value for each of its elements."""
    return sharding.local_shape(parameter) if isinstance(sharding, OptimizerShards) else own_shape(parameter)


def as_parts(state: Mapping[Any, Any], parameter: Tensor, name: str, sharding: Sharding | None) -> dict[Any, Any]:
    """The states of one of this rank's parameters; cut ones refuse operations that would be wrong on a part."""
    if sharding is None or parameter not in sharding.whole_shapes:
        return dict(state)
    whole, shape = sharding.whole_shapes[parameter], local_shape(parameter, sharding)
    is_of_data_rank = isinstance(sharding, OptimizerShards) and parameter in sharding
    return {
        key: partial_alias(value, Part(name, whole, is_of_data_rank, f"the optimizer's {key} of ", _WAY_OUT))
        if isinstance(value, Tensor) and own_shape(value) == shape
        else value
        for key, value in state.items()
    }


@dataclass(eq=False)
class StatesInUserCode(MutableMapping[Any, Any]):
    """Takes the place of `optimizer.state` between `enter` and `leave`."""

    optimizer: Optimizer
    """torch's, not Lightning's"""

    def __post_init__(self) -> None:
        self._own: MutableMapping[Any, Any] = self.optimizer.state

    def enter(self) -> None:
        """User code begins, or goes on."""
        if self.optimizer.state is not self:
            self._own, self.optimizer.state = self.optimizer.state, self  # type: ignore[assignment]


@dataclass(eq=False)
class RefusedStates(StatesInUserCode):
    """The states where each parameter's are on one rank alone: no user code may use them."""

    def leave(self) -> None:
        """User code has ended.

        Raises:
            UnsupportedError: it has loaded other states.
        """
        left: Any = self.optimizer.state
        self.optimizer.state = self._own  # type: ignore[assignment]
        if left is not self and left is not self._own:
            self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(
            f"the states of {type(self.optimizer).__name__}, which works on whole parameters, are on the rank of data "
            f"ranks and cube that updates the parameter: optimizer.state can't be used here. "
            f"trainer.save_checkpoint(path) on all ranks writes all of them."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse


@dataclass(eq=False)
class GuardedStates(StatesInUserCode):
    """The states of parameters of all ranks, of which this one has its own, or its parts of them."""

    guard: guards.ParameterGuard
    names: Mapping[Tensor, str]
    """of its parameters"""
    sharding: Sharding | None
    """of this rank's states; None if they are whole"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._given: dict[Tensor, dict[Any, Any]] = {}
        """the states that user code got, and may have changed, of parameters of all ranks"""

    def leave(self) -> None:
        """User code has ended: the optimizer gets its own states, as the code has left them.

        Raises:
            UnsupportedError: states of this rank were made of values that it hasn't got, or of a whole where it has a
                part; or code of pipeline rank 0 alone has replaced states of other ranks.
        """
        left, self.optimizer.state = self.optimizer.state, self._own  # type: ignore[assignment]
        if left is not self:
            for parameter in self._parameters:
                self._check(parameter)
            self._given = dict(left)
            self._own.clear()
        for key, state in self._given.items():
            if not isinstance(key, Placeholder):
                own = self._own.setdefault(key, {})
                own.update({name: self._plain(key, name, value) for name, value in state.items()})
                for name in own.keys() - state.keys():
                    del own[name]
        self._given = {}
        vars(self).pop("_alike", None)

    def _plain(self, parameter: Tensor, key: Any, value: Any) -> Any:
        """The optimizer's value of a state of this rank."""
        if isinstance(value, guards.MissingValues):
            guards.refuse(f"{key!r} of {self.names.get(parameter)} is made of it", value._owner)
        if isinstance(value, PartialValues):
            value = plain_alias(value)
        if isinstance(value, Tensor) and isinstance(self.sharding, OptimizerShards):
            rows = self.sharding.own_rows(parameter, value)
            value = value if rows is value else rows.clone()
        shape = () if self.sharding is None else self.sharding.whole_shapes.get(parameter, ())
        if isinstance(value, Tensor) and shape and value.shape == shape != local_shape(parameter, self.sharding):
            raise UnsupportedError(
                f"the optimizer's {key} of {self.names.get(parameter)} was set to a whole tensor {list(shape)}, and "
                f"this rank has a part. Make it of the parameter, such as by torch.zeros_like, or change it in place."
            )
        return value

    def __getitem__(self, key: Any) -> Any:
        """The states of a parameter."""
        if not isinstance(key, Tensor):
            return self._own[key]
        if key not in self._given:
            if isinstance(key, guards.GuardedPlaceholder):
                self._given[key] = self._without_values(key)
            else:
                self._given[key] = as_parts(self._own[key], key, self.names.get(key, "a parameter"), self.sharding)
        return self._given[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Give a parameter these states."""
        self._check(key)
        if isinstance(key, Tensor):
            self._given[key] = value
        if not isinstance(key, Placeholder):
            self._own[key] = value

    def __delitem__(self, key: Any) -> None:
        """Remove the states of a parameter."""
        if isinstance(key, Placeholder):
            self[key] = {}
        else:
            del self._own[key]
            self._given.pop(key, None)

    def __contains__(self, key: object) -> bool:
        """Whether a parameter has states."""
        return bool(key.requires_grad and self[key]) if isinstance(key, guards.GuardedPlaceholder) else key in self._own

    def __iter__(self) -> Iterator[Any]:
        """The parameters that have states, on any rank, in the optimizer's order."""
        yield from (parameter for parameter in self._parameters if parameter in self)
        yield from self._own.keys() - set(self._parameters)

    def __len__(self) -> int:
        """The number of parameters that have states."""
        return sum(1 for _ in self)

    def __reduce__(self) -> Any:
        """Copies are plain."""
        return partial(defaultdict, dict), (dict(self.items()),)

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @cached_property
    def _alike(self) -> dict[Tensor, Tensor | None]:
        """For each parameter, one of this rank whose states are like its own: of its group, if this rank has any there.

        None while the optimizer has made no states. Empty if this rank updates no parameters.
        """
        with torch._C.DisableTorchFunctionSubclass():
            groups = [group["params"] for group in self.optimizer.param_groups]
            owns = [[one for one in group if one.requires_grad and not one.is_meta] for group in groups]
            every = [one for own in owns for one in own]
            # A scalar's states don't tell which of them have the shape of the parameter.
            first = [
                next((one for one in sorted(own or every, key=lambda one: not one.dim()) if self._own.get(one)), None)
                for own in owns
            ]
            return {one: like for group, like in zip(groups, first, strict=True) for one in group if every}

    def _without_values(self, parameter: guards.GuardedPlaceholder) -> dict[Any, Any]:
        """The states of another pipeline rank's parameter: operations on them run there."""
        self._check(parameter)
        if parameter not in self._alike:
            guards.refuse("optimizer.state", self._owner(parameter, "state"))
        with torch._C.DisableTorchFunctionSubclass():
            like = self._alike[parameter]
            shape = () if like is None else local_shape(like, self.sharding)
            made: dict[Any, Any] = {}
            for key, value in ({} if like is None else self._own[like]).items():
                one = torch.as_tensor(value) if isinstance(value, bool | int | float) else value
                if isinstance(one, Tensor) and own_shape(one) in ((), shape):
                    empty = torch.empty(parameter.shape if one.dim() else (), dtype=one.dtype, device="meta")
                    made[key] = guards.without_values(empty, self._owner(parameter, key))
                elif one is not None:
                    guards.refuse(f"[{key!r}]", self._owner(parameter, key))
                else:
                    made[key] = None
            return made

    def _owner(self, parameter: Placeholder, key: Any) -> guards.Owner:
        of: guards.Owner = vars(parameter)["_owner"]
        return guards.Owner(f"the optimizer's {key} of {of.name}", of.rank, of.device, _WAY_OUT)

    def _check(self, parameter: Any) -> None:
        """Refuse code of pipeline rank 0 alone that uses states of another rank."""
        if isinstance(parameter, Placeholder) and not self.guard.runs_on_all_ranks:
            guards.refuse("optimizer.state", self._owner(parameter, "state"), alone=True)
