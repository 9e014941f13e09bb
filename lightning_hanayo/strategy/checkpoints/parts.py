"""Sorts a checkpoint as Lightning has it into what this rank writes of a folder.

    a parameter, its optimizer state    by one of the ranks that hold the same part of it, in turn: ranks of a cube
                                        with the same shard, data ranks
    a buffer                            by data rank 0, as in a single file
    what a hook has added               by the first rank that has it
    values that are no tensors          sent to rank 0, which writes them into one document

Which rank writes a parameter follows from its place and the order of names. So no rank need ask another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.checkpoint.format.plain_values import DistributedTensor
from lightning_hanayo.checkpoint.format.region import Region
from lightning_hanayo.checkpoint.save.part import Kind, TensorPart
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.packed_values import is_tensor_subclass
from lightning_hanayo.partial_values import PartialParameter, PartialValues, plain_alias
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.topology import Topology

WAY_OUT = "Take it out of the checkpoint in on_save_checkpoint, or save one file with HanayoStrategy(save_full=True)."


@dataclass(frozen=True)
class Place:
    """Where a rank is among those that hold the model."""

    topology: Topology
    rank: int
    cube: Cube | None
    shards: OptimizerShards | None = None
    """of the optimizer, over the data ranks"""

    @property
    def pipe_rank(self) -> int:
        """Its place on the pipeline axis."""
        return self.topology.coordinates(self.rank)[1]

    @property
    def data_rank(self) -> int:
        """Its place on the data axis."""
        return self.topology.coordinates(self.rank)[0]

    @property
    def cube_rank(self) -> int:
        """Its number in its cube."""
        return 0 if self.cube is None else self.cube.mesh.index("xyz")

    @property
    def leads(self) -> bool:
        """Whether it is the first of those with the same stages."""
        return self.data_rank == self.cube_rank == 0


@dataclass
class OwnValues:
    """What one rank tells rank 0: values that are no tensors, and which tensors it has that the module doesn't know."""

    names: list[str] = field(default_factory=list)
    """the entries of the state dict that are on this rank, if it leads"""
    added: list[str] = field(default_factory=list)
    """tensors in the state dict that a hook has added"""
    model: dict[str, Any] = field(default_factory=dict)
    optimizers: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """of each optimizer, by parameter and key"""
    without_state: list[list[str]] = field(default_factory=list)
    """of each optimizer, this rank's parameters that have no state"""


class RankTensors:
    """Collects what one rank writes.

    Args:
        parameters: of the module, which is cut into stages, and of its optimizers, by name; not guarded.
        owners: the pipeline rank of each entry of its state dict.
        place: of this rank.
    """

    def __init__(self, parameters: Mapping[str, Tensor], owners: Mapping[str, int], place: Place) -> None:
        self.values = OwnValues()
        self.parts: list[TensorPart] = []
        self._parameters = parameters
        self._owners = owners
        self._place = place
        self._added: dict[str, Tensor] = {}
        self._num_shared = 0

    def add_module(self, state: Mapping[str, Any], tied: Mapping[str, str]) -> None:
        """Add the entries of a state dict, which hooks may have changed.

        Args:
            state: as `own_state.module_state` makes it.
            tied: entries that are stored under another name.

        Raises:
            UnsupportedError: an entry can't be stored.
        """
        for name, value in state.items():
            is_here = self._owners.get(name, 0) == self._place.pipe_rank
            if not isinstance(value, Tensor):
                if is_here and self._place.leads:
                    self.values.model[name] = value
            elif not value.is_meta and name not in tied:
                self._add_entry(name, value, is_here=is_here)
        if self._place.leads:
            self.values.names = [name for name, value in state.items() if not is_meta(value)]
        self.values.added = list(self._added)

    def add_optimizer(
        self, index: int, parameters: Mapping[str, nn.Parameter], states: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Add the states of this rank's parameters.

        Args:
            index: the optimizer's number.
            parameters: its parameters by name, in its order.
            states: by number of the parameter.

        Raises:
            UnsupportedError: a state can't be stored.
        """
        own: dict[str, dict[str, Any]] = {}
        names = list(parameters)
        without = [
            number for number, one in enumerate(parameters.values()) if not one.is_meta and not states.get(number)
        ]
        self.values.optimizers.append(own)
        self.values.without_state.append([names[number] for number in without])
        for number, state in states.items():
            parameter = names[number]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self.share(f"optimizer/{index}/{parameter}/{key}", value, "optimizer")
                elif self._place.leads:
                    own.setdefault(parameter, {})[str(key)] = value

    def share(self, name: str, tensor: Tensor, kind: Kind) -> None:
        """Add a tensor if it is this rank's turn among those that have the same one, all of which call this."""
        turn, self._num_shared = self._num_shared, self._num_shared + 1
        cube, num_data, data_rank = self._place.cube, self._place.topology.data, self._place.data_rank
        if isinstance(tensor, PartialValues | PartialParameter):
            assert tensor._part is not None
            parameter = self._parameters[tensor._part.name]
            number, replicas = (0, 1) if cube is None else (cube.replica(parameter), cube.num_replicas(parameter))
            holder = self._place.shards if tensor._part.is_of_data_rank else cube
            assert holder is not None
            shape, region = tensor._part.shape, holder.region(parameter)
            if tensor._part.is_of_data_rank:  # each data rank has its own
                num_data, data_rank = 1, 0
        else:
            number, replicas = self._place.cube_rank, 1 if cube is None else cube.mesh.num_ranks
            shape, region = tuple(tensor.shape), Region.whole(tensor.shape)
        if turn % (num_data * replicas) == data_rank * replicas + number:
            self._add(TensorPart(name, tensor, shape, region, kind))

    def add_new(self, writers: Mapping[str, int]) -> None:
        """Add what hooks have added, of which this rank is to write it."""
        for name, tensor in self._added.items():
            if writers[name] == self._place.rank:
                self._add_whole(f"model/{name}", tensor, "model")

    def add_state(self, number: int, tensor: Tensor) -> None:
        """Add a tensor of the state document, on rank 0."""
        self._add_whole(f"state/{number}", tensor, "state")

    def add_distributed(self, number: int, tensor: DistributedTensor, own: Any) -> None:
        """Add what this rank holds of a tensor of the state document.

        Args:
            number: the tensor's, in the document.
            tensor: as rank 0 has it.
            own: what this rank's checkpoint has there.

        Raises:
            UnsupportedError: this rank is to write it, and has nothing.
        """
        if (tensor.pipe_rank or 0) != self._place.pipe_rank:
            return
        if not isinstance(own, Tensor) or own.is_meta:
            where = "".join(f"[{key!r}]" for key in tensor.path)
            raise UnsupportedError(f"checkpoint{where} has no values on the rank that holds them. {WAY_OUT}")
        if isinstance(own, PartialValues | PartialParameter):
            self.share(f"state/{number}", own, "state")
        elif self._place.leads:
            self._add_whole(f"state/{number}", own, "state")

    def _add_entry(self, name: str, value: Tensor, *, is_here: bool) -> None:
        if isinstance(value, PartialValues) or (is_here and name in self._parameters):
            self.share(f"model/{name}", value, "model")
        elif name not in self._owners:
            self._added[name] = value
        elif is_here and self._place.leads:
            self._add_whole(f"model/{name}", value, "model")

    def _add_whole(self, name: str, tensor: Tensor, kind: Kind) -> None:
        self._add(TensorPart.whole(name, tensor, kind))

    def _add(self, part: TensorPart) -> None:
        tensor = part.tensor
        if is_tensor_subclass(tensor) or tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"{part.name} is a {type(tensor).__name__}, which isn't one plain tensor, as those of a checkpoint's "
                f"folder are. {WAY_OUT}"
            )
        plain = plain_alias(tensor)
        if plain.numel() or 0 in part.shape:
            self.parts.append(replace(part, tensor=plain))


def tied_names(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """The entries of a state dict that are the same parameter as an earlier one: that one's name."""
    first: dict[Tensor, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state:
            other = first.setdefault(parameter, name)
            if other != name and _is_same(state[name], state[other]):
                tied[name] = other
    return tied


def first_with(added: Sequence[Sequence[str]]) -> dict[str, int]:
    """The first rank that has each tensor, of lists of those that each rank has."""
    return {name: rank for rank in reversed(range(len(added))) for name in added[rank]}


def is_meta(value: Any) -> bool:
    """Whether it is a tensor of another rank."""
    return isinstance(value, Tensor) and value.is_meta


def _is_same(one: Any, other: Any) -> bool:
    """Whether two entries have one memory, here or on the rank that has them."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return one.is_meta and other.is_meta or one.data_ptr() == other.data_ptr()
