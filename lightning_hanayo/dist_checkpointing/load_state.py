"""Loads optimizer states by the names of parameters, each rank those of its own, after checking that they belong.

    checkpoint     group 0: a.weight, b.weight      group 1: a.bias           "step", "exp_avg", "exp_avg_sq" of each
    optimizer      group 0: a.bias                  group 1: b.weight, a.weight
                   `-- the same groups in another order: each gets its own options and states

A plain file has numbers instead of names: they count the parameters of all groups, in order.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hanayo.checkpoint.format.state_document import WITHOUT_STATE
from lightning_hanayo.checkpoint.load.model_check import Source
from lightning_hanayo.checkpoint.load.module_state import Sharding, own_part
from lightning_hanayo.checkpoint.load.stored_tensor import StoredTensor
from lightning_hanayo.errors import CheckpointError, listed

_ADDED_LATER = frozenset(
    ("foreach", "maximize", "capturable", "differentiable", "fused", "amsgrad", "nesterov", "decoupled_weight_decay")
)
"""options that torch fills in itself where a file was written before it had them"""
CLASS_NAME = "class_name"
"""in an optimizer's state dict: its class, such as torch.optim.adamw.AdamW"""


@dataclass(frozen=True)
class _Saved:
    """A saved state dict, by names."""

    groups: Sequence[Mapping[str, Any]]
    """with names in "params" """
    states: Mapping[str, Mapping[str, Any]]
    others: Mapping[Any, Any]
    """what an optimizer keeps under other keys than its parameters"""
    without_state: frozenset[str]


class OptimizerState:
    """A saved state dict, checked against an optimizer; nothing has been read.

    Args:
        optimizer: with placeholders for other ranks' parameters.
        state: its saved state dict.
        names: of all parameters.
        source: where it comes from.
        accept: "optimizer_state": states may be missing, or be of other parameters.
        elementwise: whether each state has its parameter's shape, or is one number.

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
        elementwise: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._state = state
        self._source = source
        self._accepts = "optimizer_state" in accept
        self.warnings: list[str] = []
        """what was accepted"""
        self._groups = [[(names.get(p, f"an unnamed {tuple(p.shape)}"), p) for p in group["params"]]
                        for group in optimizer.param_groups]  # fmt: skip
        if not optimizer.param_groups:  # Lightning's stand-in for no optimizer
            return
        self._saved = self._by_name(state)
        self._check_options()
        self._matches = [self._matching(group) for group in self._groups]
        self._check_states()
        if elementwise:
            self._check_shapes(shapes or {})

    def load(self, sharding: Sharding | None) -> None:
        """Read this rank's states and give them to the optimizer."""
        if not self._optimizer.param_groups:
            self._optimizer.load_state_dict(dict(self._state))
            return
        states: dict[Any, Any] = dict(self._saved.others)
        groups, index = [], 0
        for group, match, now in zip(self._groups, self._matches, self._optimizer.param_groups, strict=True):
            options = self._saved.groups[match] if match is not None else now
            groups.append({**options, "params": list(range(index, index + len(group)))})
            for name, parameter in group:
                if name in self._saved.states and not parameter.is_meta:
                    values = self._saved.states[name].items()
                    states[index] = {key: _own(value, parameter, sharding) for key, value in values}
                index += 1
        rest = {key: value for key, value in self._state.items() if key not in (WITHOUT_STATE, CLASS_NAME)}
        self._optimizer.load_state_dict({**rest, "state": states, "param_groups": groups})

    def _by_name(self, state: Mapping[str, Any]) -> _Saved:
        saved, states = state["param_groups"], state["state"]
        without_state = frozenset(state.get(WITHOUT_STATE, ()))
        if any(isinstance(one, str) for group in saved for one in (*group["params"], *states)):
            return _Saved(saved, states, {}, without_state)
        sizes, own_sizes = [len(group["params"]) for group in saved], [len(group) for group in self._groups]
        if sizes != own_sizes:
            self._refuse(
                f"has groups of {sizes} parameters, this {self._name} has groups of {own_sizes}",
                "Build the same groups. Only folders that HanayoStrategy saves have the parameters' names",
            )
        own_names = [name for group in self._groups for name, _ in group]
        numbers = [number for group in saved for number in group["params"]]
        names = dict(zip(numbers, own_names, strict=True))
        named = [{**group, "params": [names[number] for number in group["params"]]} for group in saved]
        return _Saved(
            named,
            {names[key]: value for key, value in states.items() if key in names},
            {key: value for key, value in states.items() if key not in names},
            frozenset(names[number] for number in without_state if number in names),
        )

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__

    def _check_options(self) -> None:
        saved_class = str(self._state.get(CLASS_NAME, "")).rpartition(".")[2]
        if saved_class not in ("", self._name):
            self._refuse(f"has the states of {saved_class}, not of this {self._name}", self._other_optimizer)
        options = set().union(*self._saved.groups)
        lacking = sorted(getattr(self._optimizer, "defaults", {}).keys() - options - _ADDED_LATER)
        if lacking and self._saved.groups:
            self._refuse(
                f"was saved of another optimizer: its groups lack {listed(lacking)}, which this {self._name} has",
                self._other_optimizer,
            )

    def _matching(self, group: Sequence[tuple[str, Tensor]]) -> int | None:
        """The number of the saved group that has the parameters of this one; None if none has any."""
        places = {name: i for i, saved in enumerate(self._saved.groups) for name in saved["params"]}
        own = {name for name, _ in group}
        found = sorted({places[name] for name in own if name in places})
        if len(found) > 1:
            one, other = (next(n for n, _ in group if places.get(n) == i) for i in found[:2])
            self._refuse(
                f"has {one} and {other} in different param groups of its optimizer, in this {self._name} they are in "
                f"one",
                "Build the same groups; their order may be another",
            )
        others = [n for n in self._saved.groups[found[0]]["params"] if n not in own] if found else []
        elsewhere = [name for name in others if any(name == n for each in self._groups for n, _ in each)]
        if elsewhere:
            mate = next(name for name in self._saved.groups[found[0]]["params"] if name in own)
            self._refuse(
                f"has {mate} and {elsewhere[0]} in one param group of its optimizer, in this {self._name} they are in "
                f"different ones",
                "Build the same groups; their order may be another",
            )
        return found[0] if found else None

    def _check_states(self) -> None:
        own = {name: parameter for group in self._groups for name, parameter in group}
        saved_names = {name for group in self._saved.groups for name in group["params"]} | self._saved.states.keys()
        expects = bool(self._saved.states)
        missing = [
            name
            for name, parameter in own.items()
            if name not in saved_names or (expects and parameter.requires_grad and not self._has_state(name))
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

    def _has_state(self, name: str) -> bool:
        return name in self._saved.states or name in self._saved.without_state

    def _check_shapes(self, shapes: Mapping[Tensor, tuple[int, ...]]) -> None:
        for name, parameter in (pair for group in self._groups for pair in group):
            whole = shapes.get(parameter, tuple(parameter.shape))
            for key, value in self._saved.states.get(name, {}).items():
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
