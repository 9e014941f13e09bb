"""Compares what a checkpoint has with what a model needs, by names, shapes and dtypes alone: no value is read."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Differences:
    """The names that differ, each with what the checkpoint has and what the model has."""

    missing: Mapping[str, tuple[str, str]]
    extra: Mapping[str, tuple[str, str]]
    shapes: Mapping[str, tuple[str, str]]
    dtypes: Mapping[str, tuple[str, str]]
    quantized: Mapping[str, tuple[str, str]]
    num_common: int


def compare(expected: Mapping[str, Entry | None], found: Mapping[str, Any], renamed: Collection[str]) -> Differences:
    """Compare all names of a state dict.

    Args:
        expected: what the model has; None for what is no tensor.
        found: what the checkpoint has.
        renamed: beginnings of names below which modules translate names themselves.
    """
    missing = {name: ("missing", str(entry or "no tensor")) for name, entry in expected.items() if name not in found}
    extra = {name: (_text(value), "not in the model") for name, value in found.items() if name not in expected}
    pairs = {
        name: (Entry.of(value), entry)
        for name, value in found.items()
        if isinstance(value, Tensor) and (entry := expected.get(name)) is not None
    }
    return Differences(
        _without(missing, renamed),
        _without(extra, renamed),
        _rows((name, one, other) for name, (one, other) in pairs.items() if not _same_shape(one, other)),
        _rows((name, one, other) for name, (one, other) in pairs.items() if one.dtype not in (other.dtype, other.also)),
        _rows((name, one, other) for name, (one, other) in pairs.items() if one.is_packed != other.is_packed),
        len(expected.keys() & found.keys()),
    )


def check_fit(found: Differences, source: Source, model: str, *, strict: bool, accept: Collection[str]) -> list[str]:
    """Check that a model can take what the checkpoint has.

    Args:
        found: what differs.
        source: of the values.
        model: the class of the module.
        strict: whether all names must be the same.
        accept: "dtype": convert.

    Returns:
        Lines to warn with: what was accepted.

    Raises:
        CheckpointError: a table of what differs, and the ways out.
    """
    rows = {**found.quantized, **found.shapes}
    ways, accepted = [], []
    if found.quantized:
        ways.append("Quantize the model as it was quantized when it was saved, or not at all.")
    if found.shapes:
        ways.append("Build the model with the sizes that it was saved with.")
    if found.dtypes and "dtype" not in accept:
        rows |= found.dtypes
        ways.append("Give the Trainer the precision that it had, or convert: HanayoStrategy(load_anyway=('dtype',)).")
    elif found.dtypes:
        accepted.append(f"converted to the model's dtype: {listed(found.dtypes)}")
    if strict and (found.missing or found.extra):
        rows |= {**found.missing, **found.extra}
        ways.append(
            "Set self.strict_loading = False in the LightningModule to keep the model's own values of what is missing, "
            "and leave out what is not in the model."
        )
    elif found.missing or found.extra:
        accepted += [f"not in the checkpoint, keeps the model's values: {listed(found.missing)}"] * bool(found.missing)
        accepted += [f"not in the model, left out: {listed(found.extra)}"] * bool(found.extra)
    if rows:
        raise CheckpointError(
            f"{source} {_lead(found, source, model)}\n{_table(rows)}\n{' '.join(ways)} No value was changed."
        )
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


def _lead(found: Differences, source: Source, model: str) -> str:
    num_other = len(found.missing) + len(found.extra)
    if num_other <= found.num_common:
        return f"doesn't fit this {model}:"
    saved = "another model" if source.model in (None, model) else f"a {source.model}"
    return f"was saved of {saved}, not of this {model}: they have {found.num_common} names in common."


def _same_shape(stored: Entry, own: Entry) -> bool:
    return stored.shape == own.shape or (stored.shape == (1,) and own.shape == ())  # as torch's load_state_dict


def _rows(pairs: Iterator[tuple[str, Entry, Entry]]) -> dict[str, tuple[str, str]]:
    return {name: (str(one), str(other)) for name, one, other in pairs}


def _without(rows: Mapping[str, tuple[str, str]], prefixes: Collection[str]) -> dict[str, tuple[str, str]]:
    return {name: row for name, row in rows.items() if not name.startswith(tuple(prefixes))}


def _text(value: Any) -> str:
    return str(Entry.of(value)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _table(rows: Mapping[str, tuple[str, str]]) -> str:
    shown = [("name", "checkpoint", "model"), *((name, *row) for name, row in list(rows.items())[:_MAX_ROWS])]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    lines = [f"  {name:{widths[0]}}  {one:{widths[1]}}  {other}" for name, one, other in shown]
    return "\n".join(lines + [f"  ... and {len(rows) - _MAX_ROWS} more"] * (len(rows) > _MAX_ROWS))
