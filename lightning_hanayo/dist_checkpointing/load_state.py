"""Compares what a checkpoint has with what a model needs, by names, shapes and dtypes alone: no value is read.

Puts the values of a checkpoint into a module of which this rank holds a part; each tensor is read when it is copied.

checkpoint     embedding   block 0   block 1   head        names, shapes: the single process's
rank 0         read        read      .         read        a dot is a placeholder: stays as it is
rank 1         .           .         read      .           in a cube: the rank's entries of each tensor

Loads optimizer states by the names of parameters, each rank those of its own, after checking that they belong.

    checkpoint     group 0: a.weight, b.weight      group 1: a.bias           "step", "exp_avg", "exp_avg_sq" of each
    optimizer      group 0: a.bias                  group 1: b.weight, a.weight
                   `-- the same groups in another order: each gets its own options and states

A plain file has numbers instead of names: they count the parameters of all groups, in order.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, count
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.state import WITHOUT_STATE
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor
from lightning_hanayo.errors import CheckpointError, listed
from lightning_hanayo.packed_values import is_tensor_subclass

_MAX_ROWS = 10


@dataclass(frozen=True)
class Source:
    """Where values come from."""

    path: str
    model: str | None = None
    """the class of the module that was saved, if it is known"""

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Entry:
    """What a model holds under a name: all of a tensor, also where this rank has a part of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_packed: bool = False
    """whether its values aren't those of one plain tensor: a quantized weight"""
    also: torch.dtype | None = None
    """another dtype that it takes: that of its master weights"""

    @staticmethod
    def of(tensor: Tensor, shape: tuple[int, ...] | None = None, also: torch.dtype | None = None) -> "Entry":
        """What the tensor, whose whole has this shape, needs."""
        return Entry(tuple(tensor.shape) if shape is None else shape, tensor.dtype, is_tensor_subclass(tensor), also)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{' quantized' * self.is_packed}"


def check_fit(
    expected: Mapping[str, Entry | None],
    found: Mapping[str, Any],
    source: Source,
    model: nn.Module,
    *,
    strict: bool,
    accept: Collection[str],
) -> list[str]:
    """Check that a model can take what the checkpoint has, by comparing all names of a state dict.

    Args:
        expected: what the model has; None for what is no tensor.
        found: what the checkpoint has.
        source: of the values.
        model: the module. Names that its modules translate themselves may be missing or extra.
        strict: whether all names must be the same.
        accept: "dtype": convert.

    Returns:
        Lines to warn with: what was accepted.

    Raises:
        CheckpointError: a table of what differs, and the ways out.
    """
    pairs = {
        name: (Entry.of(value), entry)
        for name, value in found.items()
        if isinstance(value, Tensor) and (entry := expected.get(name)) is not None
    }

    def differing(differ: Callable[[Entry, Entry], bool]) -> dict[str, tuple[str, str]]:
        return {name: (str(one), str(own)) for name, (one, own) in pairs.items() if differ(one, own)}

    # a scalar may be stored as [1], as torch's load_state_dict has it
    shapes = differing(lambda one, own: one.shape != own.shape and (one.shape, own.shape) != ((1,), ()))
    dtypes = differing(lambda one, own: one.dtype not in (own.dtype, own.also))
    quantized = differing(lambda one, own: one.is_packed != own.is_packed)
    missing = {name: ("missing", str(entry or "no tensor")) for name, entry in expected.items() if name not in found}
    kinds = {
        name: str(Entry.of(one)) if isinstance(one, Tensor) else f"a {type(one).__name__}"
        for name, one in found.items()
    }
    extra = {name: (kind, "not in the model") for name, kind in kinds.items() if name not in expected}
    renamed = tuple(names_translated_in(model))
    missing, extra = ({name: one[name] for name in one if not name.startswith(renamed)} for one in (missing, extra))
    rows = {**quantized, **shapes}
    ways, accepted = [], []
    if quantized:
        ways.append("Quantize the model as it was quantized when it was saved, or not at all.")
    if shapes:
        ways.append("Build the model with the sizes that it was saved with.")
    if dtypes and "dtype" not in accept:
        rows |= dtypes
        ways.append("Give the Trainer the precision that it had, or convert: HanayoStrategy(load_anyway=('dtype',)).")
    elif dtypes:
        accepted.append(f"converted to the model's dtype: {listed(dtypes)}")
    if strict and (missing or extra):
        rows |= {**missing, **extra}
        ways.append(
            "Set self.strict_loading = False in the LightningModule to keep the model's own values of what is missing, "
            "and leave out what is not in the model."
        )
    elif missing or extra:
        accepted += [f"not in the checkpoint, keeps the model's values: {listed(missing)}"] * bool(missing)
        accepted += [f"not in the model, left out: {listed(extra)}"] * bool(extra)
    if rows:
        name, num_common = type(model).__name__, len(expected.keys() & found.keys())
        lead = f"doesn't fit this {name}:"
        if len(missing) + len(extra) > num_common:
            saved = "another model" if source.model in (None, name) else f"a {source.model}"
            lead = f"was saved of {saved}, not of this {name}: they have {num_common} names in common."
        raise CheckpointError(f"{source} {lead}\n{_table(rows)}\n{' '.join(ways)} No value was changed.")
    return [f"{source}: {line}" for line in accepted]


def names_translated_in(module: nn.Module) -> list[str]:
    """Beginnings of names below which a module loads its state in its own way, such as under older names."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return [""]
    own = [
        name
        for name, one in module.named_modules()
        if one._load_state_dict_pre_hooks or type(one)._load_from_state_dict is not nn.Module._load_from_state_dict
    ]
    return [f"{name}." if name else "" for name in own]


def _table(rows: Mapping[str, tuple[str, str]]) -> str:
    shown = [("name", "checkpoint", "model"), *((name, *row) for name, row in list(rows.items())[:_MAX_ROWS])]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    lines = [f"  {name:{widths[0]}}  {one:{widths[1]}}  {other}" for name, one, other in shown]
    return "\n".join(lines + [f"  ... and {len(rows) - _MAX_ROWS} more"] * (len(rows) > _MAX_ROWS))


_LOW = (torch.bfloat16, torch.float16)


class Sharding(Protocol):
    """How parameters are sharded over the ranks of a cube."""

    @property
    def whole_shapes(self) -> Mapping[Tensor, tuple[int, ...]]:
        """The shapes of the parameters of which this rank holds a part."""

    def region(self, parameter: Tensor) -> Region:
        """Which entries of a parameter this rank holds."""

    def num_replicas(self, parameter: Tensor) -> int:
        """How many ranks hold the same part of it."""

    def unshard(self, shard: Tensor, parameter: Tensor) -> Tensor:
        """All-gather the full tensor from shards that are laid out as `parameter`. Called by all ranks of the cube."""


def entries(module: nn.Module, sharding: Sharding | None, *, has_masters: bool) -> dict[str, Entry | None]:
    """What the module's state dict has in a single process, by name; None for what is no tensor.

    Args:
        module: with placeholders for other ranks' parameters.
        sharding: of a cube.
        has_masters: whether parameters in bf16 or fp16 may be saved in fp32.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shapes = {} if sharding is None else sharding.whole_shapes
    found: dict[str, Entry | None] = {}
    for name, value in module.state_dict().items():
        parameter = parameters.get(name)
        also = torch.float32 if has_masters and parameter is not None and parameter.dtype in _LOW else None
        shape = None if parameter is None else shapes.get(parameter)
        tensor = value if parameter is None else parameter
        found[name] = Entry.of(tensor, shape, also) if isinstance(tensor, Tensor) else None
    return found


def own_part(value: Tensor, parameter: Tensor, sharding: Sharding | None) -> Tensor:
    """This rank's part, not read yet, of something that has the whole parameter's shape; anything else unchanged."""
    if sharding is None or tuple(value.shape) != sharding.whole_shapes.get(parameter):
        return value
    return StoredTensor.around(value).part(sharding.region(parameter))


def not_finite(module: nn.Module, state: Mapping[str, Any], sharding: Sharding | None) -> list[str]:
    """The names of this rank's parameters that would get NaN or infinite values. Reads one part after another."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [
        name
        for name, value in state.items()
        if name in parameters and isinstance(value, Tensor) and not parameters[name].is_meta and not value.is_meta
        and not _is_finite(own_part(value, parameters[name], sharding))
    ]  # fmt: skip


def load(
    module: nn.Module, state: Mapping[str, Any], sharding: Sharding | None, source: Source, *, strict: bool
) -> None:
    """Copy this rank's part of a whole state dict into the module.

    Hooks that translate older names or values find whole values: the part is taken after them.

    Raises:
        CheckpointError: the module refuses them.
    """
    try:
        with own_parts_taken(module, sharding):
            module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        reason = " ".join(str(error).split())  # torch writes a line per problem
        raise CheckpointError(f"{source} can't be loaded into this {type(module).__name__}: {reason}") from None


@contextmanager
def own_parts_taken(module: nn.Module, sharding: Sharding | None) -> Iterator[None]:
    """Inside it, `load_state_dict` of the module takes whole values, and keeps this rank's part of them."""
    shapes = {} if sharding is None else sharding.whole_shapes
    hooks = [
        one.register_load_state_dict_pre_hook(partial(_take_parts, sharding))  # type: ignore[no-untyped-call]
        for one in module.modules()
        # other ranks have it, or a part of it
        if any(tensor.is_meta or tensor in shapes for tensor in tensors_of(one, recurse=False).values())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _take_parts(sharding: Sharding | None, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The last hook before a module copies its values: leave what this rank has of them."""
    for name, here in tensors_of(module, recurse=False).items():
        value = state.get(prefix + name)
        # a value that doesn't fit stays: torch says so on all ranks
        if isinstance(value, Tensor) and here.is_meta and (value.shape == here.shape or not here.dim()):
            state[prefix + name] = here.detach()
        elif isinstance(value, Tensor) and isinstance(here, nn.Parameter):
            state[prefix + name] = own_part(value, here, sharding)


def tensors_of(module: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers of the module, also of those in it, by all of their names."""
    which: Any = {"recurse": recurse, "remove_duplicate": False}
    return {**dict(module.named_parameters(**which)), **dict(module.named_buffers(**which))}


def _is_finite(value: Tensor) -> bool:
    if is_tensor_subclass(value) or not (value.is_floating_point() or value.is_complex()):
        return True
    here = value.read() if isinstance(value, StoredTensor) else value
    here = here.float() if here.itemsize == 1 else here
    total = here.sum(dtype=torch.promote_types(here.dtype, torch.float32))  # finite only if all values are
    return bool(total.isfinite()) or bool(here.isfinite().all())


_ADDED_LATER = frozenset(
    ("foreach", "maximize", "capturable", "differentiable", "fused", "amsgrad", "nesterov", "decoupled_weight_decay")
)
"""options that torch fills in itself where a file was written before it had them"""
CLASS_NAME = "class_name"
"""in an optimizer's state dict: its class, such as torch.optim.adamw.AdamW"""


def parameters_in(state: Mapping[str, Any]) -> list[Any]:
    """The numbers or names of the parameters in an optimizer's state dict, in the order of its groups."""
    return [key for group in state.get("param_groups", ()) for key in group["params"]]


def with_keys(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state dict with other numbers or names of parameters, and without this package's own entries."""
    groups = state.get("param_groups", ())
    return {
        **{key: value for key, value in state.items() if key not in (CLASS_NAME, WITHOUT_STATE)},
        "state": {keys.get(key, key): values for key, values in state.get("state", {}).items()},
        "param_groups": [{**group, "params": [keys.get(key, key) for key in group["params"]]} for group in groups],
    }


class OptimizerState:
    """A saved state dict, checked against an optimizer; nothing has been read.

    Args:
        optimizer: with placeholders for other ranks' parameters.
        state: its saved state dict.
        names: of all parameters.
        source: where it comes from.
        accept: "optimizer_state": states may be missing, or be of other parameters.
        shapes: of the parameters of which this rank has a part, if each state has its parameter's shape or is one
            number; None: states may have any shape.

    Raises:
        CheckpointError: it is another optimizer's, has other groups, or lacks states.
    """

    _other_optimizer = "Configure the optimizer that it was saved with, or train on from its weights alone: init_from"

    def __init__(
        self,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        names: Mapping[Tensor, str],
        source: Source,
        *,
        accept: Collection[str] = (),
        shapes: Mapping[Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._state = state
        self._source = source
        self._accepts = "optimizer_state" in accept
        self.warnings: list[str] = []
        """what was accepted"""
        self._own: dict[str, Tensor] = {}
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            self._own[names.get(parameter, f"an unnamed {tuple(parameter.shape)}, number {len(self._own)}")] = parameter
        if not optimizer.param_groups:  # Lightning's stand-in for no optimizer
            return
        self._saved_groups: Sequence[Mapping[str, Any]] = state["param_groups"]
        """with names in "params" """
        self._saved_states: Mapping[Any, Mapping[str, Any]] = state["state"]
        self._without_state = frozenset(state.get(WITHOUT_STATE, ()))
        self._others: Mapping[Any, Any] = {}
        """what an optimizer keeps under other keys than its parameters"""
        if not any(isinstance(one, str) for one in (*parameters_in(state), *self._saved_states)):
            self._name_states(state)
        self._check_options()
        self._matches = self._matching_groups()
        self._check_states()
        if shapes is not None:
            self._check_shapes(shapes)

    def load(
        self, sharding: Sharding | None, is_here: Callable[[Tensor], bool] = lambda parameter: not parameter.is_meta
    ) -> None:
        """Read the states of parameters that are here, or this rank's part of them, and give them to the optimizer."""
        if not self._optimizer.param_groups:
            self._optimizer.load_state_dict(dict(self._state))
            return
        states: dict[Any, Any] = dict(self._others)
        groups, numbers = [], count()  # load_state_dict wants numbers, counted over all groups
        for number, now in enumerate(self._optimizer.param_groups):
            options = self._saved_groups[self._matches[number]] if number in self._matches else now
            groups.append({**options, "params": [next(numbers) for _ in now["params"]]})
        for index, (name, parameter) in enumerate(self._own.items()):
            if name in self._saved_states and is_here(parameter):
                values = self._saved_states[name].items()
                states[index] = {key: _own(value, parameter, sharding) for key, value in values}
        rest = {key: value for key, value in self._state.items() if key not in (WITHOUT_STATE, CLASS_NAME)}
        self._optimizer.load_state_dict({**rest, "state": states, "param_groups": groups})

    def _name_states(self, state: Mapping[str, Any]) -> None:
        """Give the parameters of a plain file the names of the optimizer's, in order."""
        sizes = [len(group["params"]) for group in self._saved_groups]
        own_sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes != own_sizes:
            self._refuse(
                f"has groups of {sizes} parameters, this {self._name} has groups of {own_sizes}",
                "Build the same groups. Only folders that HanayoStrategy saves have the parameters' names",
            )
        names = dict(zip(parameters_in(state), self._own, strict=True))
        states = self._saved_states
        self._saved_groups = with_keys(state, names)["param_groups"]
        self._saved_states = {names[key]: values for key, values in states.items() if key in names}
        self._others = {key: value for key, value in states.items() if key not in names}
        self._without_state = frozenset(names[number] for number in self._without_state if number in names)

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__

    def _check_options(self) -> None:
        saved_class = str(self._state.get(CLASS_NAME, "")).rpartition(".")[2]
        if saved_class not in ("", self._name):
            self._refuse(f"has the states of {saved_class}, not of this {self._name}", self._other_optimizer)
        options = set().union(*self._saved_groups)
        lacking = sorted(getattr(self._optimizer, "defaults", {}).keys() - options - _ADDED_LATER)
        if lacking and self._saved_groups:
            self._refuse(
                f"was saved of another optimizer: its groups lack {listed(lacking)}, which this {self._name} has",
                self._other_optimizer,
            )

    def _matching_groups(self) -> dict[int, int]:
        """The saved group with the parameters of each of the optimizer's groups; none if their parameters are new."""
        saved = {name: number for number, one in enumerate(self._saved_groups) for name in one["params"]}
        places = {one: number for number, group in enumerate(self._optimizer.param_groups) for one in group["params"]}
        own = {name: places[parameter] for name, parameter in self._own.items() if name in saved}
        shared: dict[tuple[int, int], str] = {}  # one parameter of each pair of groups
        for name, number in own.items():
            shared.setdefault((number, saved[name]), name)
        for ((here, there), one), ((here_too, there_too), other) in combinations(shared.items(), 2):
            if here == here_too or there == there_too:
                groups = "different param groups" if here == here_too else "one param group"
                what = f"has {one} and {other} in {groups} of its optimizer, unlike this {self._name}"
                self._refuse(what, "Build the same groups; their order may be another")
        return dict(shared.keys())

    def _check_states(self) -> None:
        own = self._own
        saved_names = {name for group in self._saved_groups for name in group["params"]} | self._saved_states.keys()
        expects, has_state = bool(self._saved_states), self._saved_states.keys() | self._without_state
        missing = [
            name
            for name, parameter in own.items()
            if name not in saved_names or (expects and parameter.requires_grad and name not in has_state)
        ]
        extra = [name for name in saved_names if name not in own]
        for names, what, then in (
            (missing, "has no optimizer state of", "start with new states"),
            (sorted(extra), "has optimizer states of other parameters than this optimizer trains:", "leave them out"),
        ):
            if names and not self._accepts:
                self._refuse(
                    f"{what} {listed(names)}",
                    f"Train the same parameters, or {then}: HanayoStrategy(load_anyway=('optimizer_state',))",
                )
            if names:
                self.warnings.append(f"{self._source} {what} {listed(names)}: accepted ({then})")

    def _check_shapes(self, shapes: Mapping[Tensor, tuple[int, ...]]) -> None:
        for name, parameter in self._own.items():
            whole = shapes.get(parameter, tuple(parameter.shape))
            for key, value in self._saved_states.get(name, {}).items():
                if isinstance(value, Tensor) and value.numel() != 1 and tuple(value.shape) != whole:
                    self._refuse(
                        f"has {key} {list(value.shape)} for {name}, which is {list(whole)}",
                        "Configure the optimizer that it was saved with, its parameters in the same order",
                    )

    def _refuse(self, what: str, way_out: str) -> None:
        raise CheckpointError(f"{self._source} {what}. {way_out}.")


def _own(value: Any, parameter: Tensor, sharding: Sharding | None) -> Any:
    """This rank's part of a value of a state, in memory of its own."""
    if not isinstance(value, Tensor):
        return value
    part = own_part(value, parameter, sharding)
    if isinstance(part, StoredTensor):
        return part.read()
    return part.clone() if part is value else part
