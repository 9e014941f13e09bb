"""Lets LBFGS compute with vectors over the whole model, of which each rank holds the elements of its own parameters.

    torch's step     y.dot(s)             flat_grad.abs().max()      loss
    here             sum over the ranks   maximum over the ranks     pipeline rank 0's, mean over the data ranks

Torch's `step` runs as it is. Its vectors are of a subclass of `Tensor` whose scalar products, sums and maxima are taken
over all ranks that train one copy of the model; what acts on each element needs no other rank. Elements that several
ranks of a cube hold count once. All ranks get the same numbers, and so take the same branches.

In checkpoints of folders each parameter has its elements of the vectors, so that any layout can read them. In a plain
file they are as torch has them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.groups.on_all_ranks import with_common_errors
from lightning_hanayo.strategy.lightning.optimizers import unwrapped
from lightning_hanayo.strategy.process_groups import ProcessGroups
from lightning_hanayo.topology import Topology

_VECTORS = ("d", "prev_flat_grad")
_HISTORY = ("old_dirs", "old_stps")
_NUMBERS = ("t", "H_diag")
_SCRATCH = "al"


@dataclass(frozen=True)
class Replica:
    """The ranks that train one copy of the model, and those that train others, as sums over them need it.

    Args:
        groups: of this run; None on one rank.
        counts: [elements of this rank], 1 for those that count on this rank; None: all do.
        num_data: D, data ranks.
    """

    groups: ProcessGroups | None
    counts: Tensor | None
    num_data: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a state, which can't hold groups, are vectors of this rank."""
        return Replica, (None, None, 1)

    def product(self, one: Tensor, other: Tensor) -> Tensor:
        """The scalar product of two vectors."""
        return self._reduce((one if self.counts is None else one * self.counts).dot(other), dist.ReduceOp.SUM)

    def sum(self, vector: Tensor) -> Tensor:
        """The sum of a vector's elements."""
        return self._reduce((vector if self.counts is None else vector * self.counts).sum(), dist.ReduceOp.SUM)

    def max(self, vector: Tensor) -> Tensor:
        """The largest element."""
        return self._reduce(vector.max(), dist.ReduceOp.MAX)

    def loss(self, own: Any, device: torch.device) -> Tensor:
        """The loss of all data ranks' samples; on pipeline ranks above 0 `own` means nothing."""
        loss = torch.zeros((), dtype=torch.float64, device=device)
        if isinstance(own, Tensor):
            loss.copy_(own.detach())
        if self.groups is None:
            return loss
        if self.groups.data is not None:
            dist.all_reduce(loss, group=self.groups.data)
        if len(self.groups.replica_ranks) > 1:
            dist.broadcast(loss, self.groups.replica_ranks[0], group=self.groups.replica_tensors)
        return loss / self.num_data

    def _reduce(self, value: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.groups is not None and len(self.groups.replica_ranks) > 1:
            dist.all_reduce(value, how, group=self.groups.replica_tensors)
        return value


class ModelVector(Tensor):
    """This rank's elements of a vector over all parameters: products, sums and maxima are those of the whole vector."""

    replica: Replica

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reduce over the ranks, or act on each element."""
        replica = next(one.replica for one in args if isinstance(one, cls))
        with torch._C.DisableTorchFunctionSubclass():
            if func in _REDUCTIONS:
                return _REDUCTIONS[func](replica, *args)
            result = func(*args, **(kwargs or {}))
        same = isinstance(result, cls) or not isinstance(result, Tensor) or result.dim() != 1
        return result if same else vector(result, replica)


_REDUCTIONS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    Tensor.dot: Replica.product,
    Tensor.sum: Replica.sum,
    Tensor.max: Replica.max,
}


def vector(elements: Tensor, replica: Replica) -> ModelVector:
    """This rank's elements, [n], as a part of the vector over all parameters."""
    made = elements.as_subclass(ModelVector)
    made.replica = replica
    return made


class ModelLBFGS(LBFGS):
    """Torch's LBFGS, with vectors over the model. Objects get this class at set-up, and keep torch's name."""

    replica: Replica

    def state_dict(self) -> dict[str, Any]:
        """With each of this rank's parameters' elements of the vectors."""
        packed: dict[str, Any] = super().state_dict()
        whole = [parameter for group in self.param_groups for parameter in group["params"]]
        flat = next(iter(packed["state"].values()), None)
        if flat is None:
            return packed
        states = split(flat, [tuple(parameter.shape) for parameter in self._params])
        own = [index for index, parameter in enumerate(whole) if not parameter.is_meta]
        return {**packed, "state": dict(zip(own, states, strict=True))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returns."""
        states = state_dict["state"]
        flat = {min(states): joined([states[index] for index in sorted(states)])} if states else {}
        super().load_state_dict({**state_dict, "state": flat})
        self._params = _own(self)
        self._wrap()

    def _gather_flat_grad(self) -> Tensor:
        return vector(super()._gather_flat_grad(), self.replica)

    def _add_grad(self, step_size: Any, update: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super()._add_grad(step_size, update.as_subclass(Tensor))

    def _wrap(self) -> None:
        for state in self.state.values():
            for key in state.keys() & set(_VECTORS):
                state[key] = vector(state[key], self.replica)
            for key in state.keys() & set(_HISTORY):
                state[key] = [vector(one, self.replica) for one in state[key]]


for _attribute in ("__name__", "__qualname__", "__module__"):
    setattr(ModelLBFGS, _attribute, getattr(LBFGS, _attribute))


def use_whole_model(
    optimizers: Sequence[Optimizer],
    groups: ProcessGroups,
    topology: Topology,
    *,
    number_of: Callable[[Tensor], int] | None,
    by_samples: bool,
) -> None:
    """Let those that are LBFGS compute with the whole model. Called by all ranks, before the first step.

    Args:
        optimizers: the module's.
        groups: of this run.
        topology: of all ranks.
        number_of: this rank's number among those of its cube that hold the same shard; None without a cube.
        by_samples: whether each data rank's loss counts the same.

    Raises:
        UnsupportedError: on all ranks, if one of them holds no parameter of the optimizer, or losses count differently.
    """
    for optimizer in map(unwrapped, optimizers):
        if type(optimizer) is LBFGS:
            if topology.data > 1 and not by_samples:
                raise UnsupportedError(
                    "LBFGS compares losses, and with data ranks it needs their mean, but this loss_weight gives each "
                    "data rank another weight. Set HanayoStrategy(loss_weight='samples'), or use data=1."
                )
            with_common_errors(lambda one=optimizer: _check_own(one))  # type: ignore[misc]
            optimizer.__class__ = ModelLBFGS
            assert isinstance(optimizer, ModelLBFGS)
            optimizer._params, optimizer._numel_cache = _own(optimizer), None
            counts = None if number_of is None else _counts(optimizer._params, number_of)
            optimizer.replica = Replica(groups, counts, topology.data)
            optimizer.register_step_pre_hook(_share_loss)


def disconnect(optimizers: Sequence[Optimizer]) -> None:
    """After the run: forget the other ranks, so that the optimizer can be copied."""
    for optimizer in map(unwrapped, optimizers):
        if isinstance(optimizer, ModelLBFGS):
            optimizer.replica = Replica(None, None, 1)
            optimizer._wrap()


def split(flat: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
    """The state as torch has it, as one of each parameter: {"n_iter": 3, "d": [4, 2], "old_dirs.0": [4, 2], ...}."""
    numbers = {key: value for key, value in flat.items() if key not in (*_VECTORS, *_HISTORY, _SCRATCH)}
    numbers |= {key: float(numbers[key]) for key in _NUMBERS if key in numbers}
    if "ro" in numbers:
        numbers["ro"] = [float(one) for one in numbers["ro"]]
    vectors = {key: flat[key] for key in _VECTORS if key in flat}
    vectors |= {f"{key}.{i}": one for key in _HISTORY for i, one in enumerate(flat.get(key, ()))}
    sizes = [prod(shape) for shape in shapes]
    cut = {key: one.as_subclass(Tensor).split(sizes) for key, one in vectors.items()}
    return [{**numbers, **{key: parts[i].view(shape) for key, parts in cut.items()}} for i, shape in enumerate(shapes)]


def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The inverse of `split`."""
    first = states[0]
    vectors = {key: torch.cat([state[key].reshape(-1) for state in states])
               for key, value in first.items() if isinstance(value, Tensor)}  # fmt: skip
    flat = {key: value for key, value in first.items() if key not in vectors}
    flat |= {key: vectors[key] for key in _VECTORS if key in vectors}
    if "ro" in flat:
        flat |= {key: [vectors[f"{key}.{i}"] for i in range(len(flat["ro"]))] for key in _HISTORY}
    return flat


def as_torch_has_it(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A gathered state dict with the states of all parameters, for a plain file; of other optimizers as it is."""
    states = state["state"] if isinstance(optimizer, ModelLBFGS) else {}
    return {**state, "state": {0: joined([states[index] for index in sorted(states)])}} if states else state


def by_parameter(
    optimizer: Optimizer, state: Mapping[str, Any], shapes: Mapping[Tensor, tuple[int, ...]]
) -> Mapping[str, Any]:
    """The reverse, for a state dict that was read from a file; `shapes`: the whole ones of parts."""
    if not isinstance(optimizer, ModelLBFGS) or set(state["state"]) != {0}:
        return state
    parameters = optimizer.param_groups[0]["params"]
    whole = [tuple(shapes.get(parameter, parameter.shape)) for parameter in parameters]
    return {**state, "state": dict(enumerate(split(state["state"][0], whole)))}


def _share_loss(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Called before each step: the closure returns the same loss on all ranks."""
    assert isinstance(optimizer, ModelLBFGS)
    closures = [*args[1:], *kwargs.values()]
    if len(closures) != 1:
        return None  # torch says that it needs a closure
    device = optimizer._params[0].device
    return args[:1], {"closure": lambda: optimizer.replica.loss(closures[0](), device)}


def _counts(parameters: Sequence[Tensor], number_of: Callable[[Tensor], int]) -> Tensor:
    """1 for each element of which this rank is the first that holds it."""
    return torch.cat([torch.full_like(p.detach(), float(number_of(p) == 0)).view(-1) for p in parameters])


def _own(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for parameter in optimizer.param_groups[0]["params"] if not parameter.is_meta]


def _check_own(optimizer: Optimizer) -> None:
    if not _own(optimizer):
        raise UnsupportedError(
            "LBFGS has none of the parameters of a rank of the pipeline, and each needs one, to know how far its "
            "history goes. Give it parameters of all stages, or use an optimizer such as AdamW."
        )
