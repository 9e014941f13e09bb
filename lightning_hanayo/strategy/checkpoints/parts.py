"""Sorts a checkpoint as Lightning has it into what this rank writes of a folder.

    a parameter, its optimizer state    by one of the ranks that hold the same part of it, in turn: ranks of a cube
                                        with the same shard, data ranks
    a buffer                            by data rank 0, as in a single file
    what a hook has added               by the first rank that has it
    values that are no tensors          sent to rank 0, which writes them into one document

Which rank writes a parameter follows from its place and the order of names. So no rank need ask another.

Collects what each rank writes of a checkpoint: its tensors, and on rank 0 the documents.

hooks      Lightning asks each rank for its state, and hooks change it
collect    each rank sorts what it holds, and tells the others what they can't know: values that are no tensors
document   rank 0 puts those and its own together

Makes the two documents of a checkpoint's folder: its state, and what the manifest says of the whole.

What a rank gives Lightning of the state of model and optimizers, when a checkpoint is a folder.

rank 0                                              rank 1, of the same pipeline
    "embedding.weight"   a tensor                       "embedding.weight"   without values
    "blocks.0.weight"    a tensor, or its part          "blocks.0.weight"    without values
    "blocks.1.weight"    without values                 "blocks.1.weight"    a tensor, or its part

Every rank has all names, so that a hook that deletes or renames entries does the same on all of them. A part, in a
cube, keeps the name of its parameter through copies, and refuses what would be wrong on parts.

Finds tensors deep in a checkpoint that several ranks hold together, such as a callback's average of the weights.

rank 0    {"average": {"blocks.0.weight": a tensor, "blocks.1.weight": without values}}
rank 1    {"average": {"blocks.0.weight": without values, "blocks.1.weight": a tensor}}

Rank 0 writes the document, and has the same keys as all others. It says where in it a value is missing or a part, and
each rank writes what it has there.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import key_get, keystr, tree_map_with_path

from lightning_hanayo.dist_checkpointing.commit import Kind, RankPart, TensorPart
from lightning_hanayo.dist_checkpointing.huggingface import transformers_models
from lightning_hanayo.dist_checkpointing.load_state import Sharding, with_keys
from lightning_hanayo.dist_checkpointing.plain_file import numbered_state_dict
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.state import STATE, DistributedTensor, OptimizerDocument, StateDocument
from lightning_hanayo.dist_checkpointing.tensor_file import dtype_name
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import Part, PartialParameter, PartialValues, own_shape, partial_alias, plain_alias
from lightning_hanayo.partition.guards import MissingValues, Owner, without_values
from lightning_hanayo.strategy.checkpoints.resume import KEY, ResumeState, with_resume
from lightning_hanayo.strategy.joining import on_all_ranks, with_common_errors
from lightning_hanayo.strategy.lightning.state import unwrapped
from lightning_hanayo.strategy.optimizer_shards import OptimizerShards
from lightning_hanayo.strategy.run import Run

if TYPE_CHECKING:
    from lightning_hanayo.strategy.optimizer_steps import OptimizerSteps

WAY_OUT = "Take it out of the checkpoint in on_save_checkpoint, or save one file with HanayoStrategy(save_full=True)."


@dataclass
class OwnValues:
    """What one rank tells rank 0: values that are no tensors, and which tensors it has that the module doesn't know."""

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
        steps: of this rank's run; the module is cut into stages, and its parameters are not guarded.
        names: of the parameters.
    """

    def __init__(self, steps: "OptimizerSteps", names: Mapping[Tensor, str]) -> None:
        run, module = steps.run, steps.run.module
        self.values = OwnValues()
        self.parts: list[TensorPart] = []
        self._parameters: dict[str, Tensor] = {name: one for one, name in names.items()}
        self._parameters |= dict(module.named_parameters(remove_duplicate=False))
        self._owners = run.pipeline.ownership.rank_by_name(module)
        self._run, self._steps = run, steps
        self._cube_rank = run.mesh.index("xyz")
        self._leads = run.data_rank == self._cube_rank == 0
        """whether this is the first of the ranks with the same stages"""
        self.added: dict[str, Tensor] = {}
        """what hooks have added, of which the first rank that has it writes it"""
        self._num_shared = 0

    def add_module(self, state: Mapping[str, Any], tied: Mapping[str, str]) -> None:
        """Add the entries of a state dict, which hooks may have changed.

        Args:
            state: as `module_state` makes it.
            tied: entries that are stored under another name.

        Raises:
            UnsupportedError: an entry can't be stored.
        """
        for name, value in state.items():
            is_here = self._owners.get(name, 0) == self._run.pipe_rank
            if not isinstance(value, Tensor):
                if is_here and self._leads:
                    self.values.model[name] = value
            elif value.is_meta or name in tied:
                pass  # another rank has it, or it is stored under another name
            elif isinstance(value, PartialValues) or (is_here and name in self._parameters):
                self.share(f"model/{name}", value, "model")
            elif name not in self._owners:
                self.added[name] = value
            elif is_here and self._leads:
                self.add_whole(f"model/{name}", value, "model")
        self.values.added = list(self.added)

    def add_optimizer(self, parameters: Mapping[str, nn.Parameter], states: Mapping[int, Mapping[str, Any]]) -> None:
        """Add the states of this rank's parameters, of one optimizer after another.

        Args:
            parameters: its parameters by name, in its order.
            states: by number of the parameter.

        Raises:
            UnsupportedError: a state can't be stored.
        """
        own: dict[str, dict[str, Any]] = {}
        index, names, tensors = len(self.values.optimizers), list(parameters), list(parameters.values())
        without = [name for n, name in enumerate(names) if self._steps.updates(tensors[n]) and not states.get(n)]
        is_alone = self._steps.all_ranks is not None  # no other rank has the same states
        self.values.optimizers.append(own)
        self.values.without_state.append(without)
        for number, state in states.items():
            for key, value in state.items():
                name = f"optimizer/{index}/{names[number]}/{key}"
                if isinstance(value, Tensor):
                    (self.add_whole if is_alone else self.share)(name, value, "optimizer")
                elif is_alone or self._leads:
                    own.setdefault(names[number], {})[str(key)] = value

    def share(self, name: str, tensor: Tensor, kind: Kind) -> None:
        """Add a tensor if it is this rank's turn among those that have the same one, all of which call this."""
        turn, self._num_shared = self._num_shared, self._num_shared + 1
        cube, num_data, data_rank = self._run.cube, self._run.topology.data, self._run.data_rank
        if isinstance(tensor, PartialValues | PartialParameter):
            assert tensor._part is not None
            parameter = self._parameters[tensor._part.name]
            number, replicas = (0, 1) if cube is None else (cube.replica(parameter), cube.num_replicas(parameter))
            holder = self._steps.shards if tensor._part.is_of_data_rank else cube
            assert holder is not None
            shape, region = tensor._part.shape, holder.region(parameter)
            if tensor._part.is_of_data_rank:  # each data rank has its own
                num_data, data_rank = 1, 0
        else:
            number, replicas = self._cube_rank, self._run.mesh.num_ranks
            shape, region = tuple(tensor.shape), Region.whole(tensor.shape)
        if turn % (num_data * replicas) == data_rank * replicas + number:
            self._add(TensorPart(name, tensor, shape, region, kind))

    def add_distributed(self, number: int, tensor: DistributedTensor, own: Any) -> None:
        """Add what this rank holds of a tensor of the state document.

        Args:
            number: the tensor's, in the document.
            tensor: as rank 0 has it.
            own: what this rank's checkpoint has there.

        Raises:
            UnsupportedError: this rank is to write it, and has nothing.
        """
        if (tensor.pipe_rank or 0) != self._run.pipe_rank:
            return
        if not isinstance(own, Tensor) or own.is_meta:
            raise UnsupportedError(
                f"checkpoint{keystr(tensor.path)} has no values on the rank that holds them. {WAY_OUT}"
            )
        if isinstance(own, PartialValues | PartialParameter):
            self.share(f"state/{number}", own, "state")
        elif self._leads:
            self.add_whole(f"state/{number}", own, "state")

    def add_whole(self, name: str, tensor: Tensor, kind: Kind) -> None:
        """Add a tensor that this rank writes alone."""
        self._add(TensorPart.whole(name, tensor, kind))

    def _add(self, part: TensorPart) -> None:
        dtype_name(part.tensor, part.name)  # raises if it can't be stored
        plain = plain_alias(part.tensor)
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


def _is_same(one: Any, other: Any) -> bool:
    """Whether two entries have one memory, here or on the rank that has them."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return one.is_meta and other.is_meta or one.data_ptr() == other.data_ptr()


def rank_part(
    checkpoint: Mapping[str, Any], steps: "OptimizerSteps", names: Mapping[Tensor, str], resume: ResumeState | None
) -> RankPart:
    """What this rank writes of a checkpoint. Called by all ranks of the world.

    Args:
        checkpoint: Lightning's, as hooks have left it, with the state dicts of `module_state` and `optimizer_state`.
        steps: of this rank's run; the module is cut into stages, and its parameters are not guarded.
        names: of the parameters, also of those that only the optimizers have.
        resume: what this rank adds for a run that goes on from the checkpoint.

    Raises:
        UnsupportedError: on all ranks, if one has something that can't be stored.
    """
    checkpoint = checkpoint if resume is None else {**checkpoint, KEY: {"run": dict(resume.document)}}
    run = steps.run
    optimizers = map(unwrapped, run.trainer.optimizers)
    named_optimizers = [(one, named_parameters_of(one, names)) for one in optimizers]
    tied, rank = tied_names(run.module, checkpoint[MODEL]), run.rank
    tensors = RankTensors(steps, names)

    def collect() -> OwnValues:
        tensors.add_module(checkpoint[MODEL], tied)
        for (_, parameters), state in zip(named_optimizers, checkpoint.get(OPTIMIZERS, ()), strict=False):
            tensors.add_optimizer(parameters, state.get("state", {}))
        return tensors.values

    gathered = on_all_ranks(collect)
    writers = {name: one for one in reversed(range(len(gathered))) for name in gathered[one].added}
    for name, tensor in tensors.added.items():
        if writers[name] == rank:
            tensors.add_whole(f"model/{name}", tensor, "model")
    texts: dict[str, Any] = {}

    def write_document() -> dict[int, DistributedTensor]:
        if rank > 0:
            return {}
        texts[STATE], found = state_document(checkpoint, tied, named_optimizers, gathered).encode()
        for number, one in enumerate(found):
            if isinstance(one, Tensor):
                tensors.add_whole(f"state/{number}", one, "state")
        return {number: one for number, one in enumerate(found) if isinstance(one, DistributedTensor)}

    distributed = on_all_ranks(write_document)[0]

    def complete() -> RankPart:
        for number, one in distributed.items():
            tensors.add_distributed(number, one, value_at(checkpoint, one.path))
        part = RankPart(tensors.parts, texts, about(checkpoint, run) if rank == 0 else {})
        return part if resume is None else with_resume(part, resume)

    return with_common_errors(complete)


MODEL, OPTIMIZERS = "state_dict", "optimizer_states"


def state_document(
    checkpoint: Mapping[str, Any],
    tied: Mapping[str, str],
    optimizers: Sequence[tuple[Optimizer, Mapping[str, nn.Parameter]]],
    gathered: Sequence[OwnValues],
) -> StateDocument:
    """The state of rank 0, with the values that other ranks have sent.

    Args:
        checkpoint: Lightning's, as hooks have left it.
        tied: entries of the state dict that are stored under another name.
        optimizers: with their parameters by name.
        gathered: of all ranks.
    """
    state = checkpoint[MODEL]
    names = dict.fromkeys((*state, *(name for own in gathered for name in (*own.added, *own.model))))
    documents: list[OptimizerDocument] = []
    states = checkpoint.get(OPTIMIZERS)
    for index, ((optimizer, parameters), one) in enumerate(zip(optimizers, states or (), strict=False)):
        kind = type(optimizer)
        without = dict.fromkeys(name for own in gathered for name in own.without_state[index])
        document = OptimizerDocument(
            class_name=f"{kind.__module__}.{kind.__qualname__}",
            param_groups=with_keys(one, dict(enumerate(parameters)))["param_groups"],
            values={parameter: values for own in gathered for parameter, values in own.optimizers[index].items()},
            without_state=[n for n in parameters if n in without] if len(without) < len(parameters) else [],
            rest={key: value for key, value in one.items() if key not in ("state", "param_groups")},
        )
        documents.append(document)
    rest = {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}
    return StateDocument(
        checkpoint=with_distributed_marked(rest),
        names=list(names),
        tied=dict(tied),
        values={name: value for own in gathered for name, value in own.model.items()},
        versions=dict(getattr(state, "_metadata", {})),
        optimizers=None if states is None else documents,
    )


def about(checkpoint: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """What the manifest says of a checkpoint, for those who list and export it. JSON."""
    module, layout = run.module, run.pipeline.layout
    shapes = {} if run.cube is None else run.cube.whole_shapes
    models = transformers_models(module)
    configs = [(name, one, one.config.to_json_string(use_diff=False)) for name, one in models]
    return {
        "step": checkpoint.get("global_step", 0),
        "epoch": checkpoint.get("epoch", 0),
        "layout": {**asdict(run.topology), "waves": layout.num_waves, "schedule": layout.schedule},
        "module": type(module).__qualname__,
        "num_parameters": sum(prod(shapes.get(one, one.shape)) for one in module.parameters()),
        "versions": {name.replace("-", "_"): version(name) for name in ("lightning-hanayo", "lightning", "torch")},
        "huggingface": [
            {"prefix": name, "class": type(one).__name__, "config": json.loads(text)} for name, one, text in configs
        ],
    }


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
        vars(one)["_part"] = Part(name, shapes[one], isinstance(sharding, OptimizerShards) and one in sharding)
        one.__class__ = PartialParameter
    try:
        yield
    finally:
        for (_, one), own_class, before in zip(parts, classes, parts_before, strict=True):
            one.__class__ = own_class
            vars(one)["_part"] = before


def optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str], steps: "OptimizerSteps") -> dict[str, Any]:
    """The optimizer's state dict on this rank: with the states of its own parameters. They are not guarded.

    Args:
        optimizer: torch's, not Lightning's.
        names: of the module's parameters.
        steps: know which states are here.

    Raises:
        UnsupportedError: a parameter isn't one of the module's, or it isn't known which states are whose.
    """
    sharding = steps.sharding
    is_cut = sharding is not None or steps.all_ranks is not None or any(parameter.is_meta for parameter in names)
    state = numbered_state_dict(optimizer, is_cut=is_cut)
    if not optimizer.param_groups:  # Lightning's, for `configure_optimizers` that returns None
        return state
    own = {}
    for index, (name, parameter) in enumerate(named_parameters_of(optimizer, names).items()):
        if index in state["state"] and steps.updates(parameter):  # Adagrad's constructor makes states of placeholders
            own[index] = _as_parts(state["state"][index], parameter, name, sharding)
    return {**state, "state": own}


_WAY_OUT_OF_STATES = (
    "Optimizer states are on the ranks that update their parameters. Change each in place by numbers and by states of "
    "its own parameter, in a hook that runs on all ranks; trainer.save_checkpoint(path) writes all of them"
)


def _as_parts(state: Mapping[Any, Any], parameter: Tensor, name: str, sharding: Sharding | None) -> dict[Any, Any]:
    """The states of one of this rank's parameters; cut ones refuse operations that would be wrong on a part."""
    if sharding is None or parameter not in sharding.whole_shapes:
        return dict(state)
    whole, shape, is_of_data_rank = sharding.whole_shapes[parameter], own_shape(parameter), False
    if isinstance(sharding, OptimizerShards):
        shape, is_of_data_rank = sharding.local_shape(parameter), parameter in sharding
    return {
        key: partial_alias(value, Part(name, whole, is_of_data_rank, f"the optimizer's {key} of ", _WAY_OUT_OF_STATES))
        if isinstance(value, Tensor) and own_shape(value) == shape
        else value
        for key, value in state.items()
    }


def named_parameters_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in the order in which its state dict numbers them.

    Raises:
        UnsupportedError: one has no name.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strange := [parameter for parameter in parameters if parameter not in names]:
        raise UnsupportedError(
            f"the optimizer has a parameter of the shape {tuple(strange[0].shape)} that isn't one of the module's, so "
            f"that a checkpoint has no name for it. Make it a parameter of the module."
        )
    return {names[parameter]: parameter for parameter in parameters}


def with_distributed_marked(value: Any) -> Any:
    """The value, with a `DistributedTensor` in place of each tensor of which this rank has a part or nothing."""

    def marked(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, MissingValues | PartialValues | PartialParameter):
            return DistributedTensor(path, leaf._owner.rank if isinstance(leaf, MissingValues) else None)
        return leaf

    return tree_map_with_path(marked, value)


def value_at(checkpoint: Any, path: tuple[Any, ...]) -> Tensor | None:
    """What this rank's checkpoint has at a path; None if it is nothing, or no tensor."""
    with suppress(KeyError, IndexError, TypeError):
        found = key_get(checkpoint, path)
        return found if isinstance(found, Tensor) else None
    return None
