"""Compares two checkpoints of any kind, entry by entry, one tensor at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.checkpoint.convert.opened import OpenedCheckpoint, open_checkpoint
from lightning_hanayo.checkpoint.format.state_document import WITHOUT_STATE
from lightning_hanayo.checkpoint.load.optimizer_state import CLASS_NAME
from lightning_hanayo.checkpoint.load.stored_tensor import StoredTensor

_MAX_TEXT = 40


@dataclass(frozen=True)
class Difference:
    """An entry of either checkpoint, and how it differs."""

    name: str
    what: str
    """"" if it is equal in both"""
    largest: float | None = None
    """the largest difference of two values; infinite if one of them is NaN"""


def compare(first: str, second: str, *, model_only: bool = False) -> list[Difference]:
    """Verify and compare two checkpoints: folders of any layout, or plain files.

    Args:
        model_only: leave out optimizers, loops, callbacks and all else.

    Example:
        >>> [one.name for one in compare("a.ckpt", "b.ckpt") if one.what]
        ['state_dict/net.0.weight']

    Raises:
        CheckpointError: one isn't whole, or can't be read without running code.
    """
    opened = [open_checkpoint(first), open_checkpoint(second)]
    one, other = (dict(_entries(_comparable(opened, index, model_only))) for index in (0, 1))
    return [_difference(name, one, other) for name in {**one, **other}]


def _comparable(opened: list[OpenedCheckpoint], index: int, model_only: bool) -> dict[str, Any]:
    """The content, with names in place of numbers in the states of optimizers, if the other one has names."""
    content = opened[index].content
    if model_only:
        return {"state_dict": content["state_dict"]}
    result = {key: value for key, value in content.items() if key != "hparams_name"}
    if "optimizer_states" in result:
        others = opened[1 - index].content.get("optimizer_states", [])
        result["optimizer_states"] = [
            _named(state, others[number] if number < len(others) else {})
            for number, state in enumerate(result["optimizer_states"])
        ]
    return result


def _named(state: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict, with the other one's names if it has numbers alone."""
    own = [one for group in state.get("param_groups", ()) for one in group["params"]]
    names = [one for group in other.get("param_groups", ()) for one in group["params"]]
    translated = dict(zip(own, names, strict=True)) if CLASS_NAME in other and len(own) == len(names) else {}
    groups = [
        {**group, "params": [translated.get(one, one) for one in group["params"]]}
        for group in state.get("param_groups", ())
    ]
    states = {str(translated.get(one, one)): values for one, values in state.get("state", {}).items()}
    rest = {key: value for key, value in state.items() if key not in (CLASS_NAME, WITHOUT_STATE)}
    return {**rest, "state": states, "param_groups": groups}


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested dictionaries and lists, by path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _entries(inner, f"{name}/{key}".lstrip("/"))
    elif isinstance(value, list | tuple) and value:
        for index, inner in enumerate(value):
            yield from _entries(inner, f"{name}/{index}")
    else:
        yield name, value


def _difference(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference:
    if name not in other:
        return Difference(name, "only in the first")
    if name not in one:
        return Difference(name, "only in the second")
    a, b = one[name], other[name]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _of_tensors(name, a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor) or type(a) is not type(b):
        return Difference(name, f"{type(a).__name__} and {type(b).__name__}")
    if _equal(a, b):
        return Difference(name, "")
    return Difference(name, f"{_short(a)} and {_short(b)}", abs(a - b) if isinstance(a, int | float) else None)


def _of_tensors(name: str, a: Tensor, b: Tensor) -> Difference:
    if a.shape != b.shape:
        return Difference(name, f"shapes {list(a.shape)} and {list(b.shape)}")
    if a.dtype != b.dtype:
        return Difference(name, f"{a.dtype} and {b.dtype}".replace("torch.", ""))
    a, b = _values(a), _values(b)
    both_nan = a.isnan() & b.isnan() if a.dtype.is_floating_point or a.dtype.is_complex else torch.zeros(())
    differs = (a != b) & ~both_nan.bool()
    count = int(differs.sum())
    if not count:
        return Difference(name, "")
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    gap = (a[differs].to(wide) - b[differs].to(wide)).abs()
    largest = float(gap.nan_to_num(nan=float("inf")).max())
    return Difference(name, f"{count} of {a.numel()} values", largest)


def _values(tensor: Tensor) -> Tensor:
    read = tensor.read() if isinstance(tensor, StoredTensor) else tensor
    is_small = read.dtype.is_floating_point and read.element_size() == 1
    return read.float() if is_small else read  # NumPy's and torch's comparisons don't know all formats of 8 bits


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or (a != a and b != b)  # NaN
    except (ValueError, RuntimeError):  # arrays
        return repr(a) == repr(b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
