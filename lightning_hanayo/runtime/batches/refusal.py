"""What can't be cut into micro-batches: the errors, with the option that helps."""

import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.batches.containers import Array, Attribute, children, holds_arrays
from lightning_hanayo.runtime.batches.plan import BatchRule

SPLIT_BATCH = "HanayoStrategy(split_batch=lambda batch, n: ...), a function that returns at most n micro-batches"
_READY = "If it is a batch, say so by DataLoader(collate_fn=lambda batch: batch)."
MAX_SHAPES = 12
"""how many shapes a message lists"""


def step_to(container: Any, key: Any) -> str:
    """How Python code gets from a container to an item."""
    if isinstance(key, Attribute):
        return f".{key.name}"
    return f"[{key!r}]" if isinstance(container, Mapping) or isinstance(key, int) else f".{key}"


def check_layout(value: Any, path: str) -> None:
    """Reject tensors without rows of one size.

    Raises:
        UnsupportedError: a nested tensor, or a sparse one that has no rows.
    """
    if isinstance(value, Tensor) and (value.is_nested or value.layout not in (torch.strided, torch.sparse_coo)):
        layout = "jagged or nested" if value.is_nested else str(value.layout)
        raise _uncuttable(f"{path} is a tensor with the layout {layout}", path)


def check_opaque(value: Any, path: str) -> None:
    """Reject an object that is no container and holds tensors: what else in it depends on the samples isn't known.

    Raises:
        UnsupportedError: it does.
    """
    if isinstance(value, (str, bytes, Number, type(None))):  # most values: they need no search
        return
    attributes = dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
    slots = {name: getattr(value, name, None) for cls in type(value).__mro__ for name in _slots(cls)}
    items = list(value) if isinstance(value, (set, frozenset, deque)) else []
    if isinstance(value, PackedSequence) or holds_arrays([attributes, slots, items]):
        raise _uncuttable(f"{path} is a {type(value).__qualname__} that holds tensors", path)


def unbatched(path: str, shapes: list[tuple[int, ...]]) -> UnsupportedError:
    """The error for tensors of one dimension that a dataset has given without a collate_fn."""
    return UnsupportedError(
        f"{path} comes from a DataLoader with batch_size=None, and its tensors have one dimension: "
        f"{', '.join(map(str, shapes[:MAX_SHAPES]))}. That may be the features of one sample, which can't be cut into "
        f"micro-batches, or the samples of a batch. {_READY} Otherwise set batch_size."
    )


def warn_of_unbatched(path: str, shape: tuple[int, ...], samples: int) -> None:
    """Nothing but one tensor says how many samples there are."""
    warnings.warn(
        f"{path} comes from a DataLoader with batch_size=None. It is cut as a batch of {samples} samples, by its only "
        f"tensor with rows, of shape {shape}. {_READY} If it is one sample, set batch_size, or num_microbatches=1 "
        f"without a cube.",
        stacklevel=2,
    )


def disagreement(
    batch: Any, path: str, possible: list[int], rule: BatchRule, *, is_sequence_first: bool
) -> UnsupportedError:
    """The error for tensors that don't agree on a number of samples, with all shapes by key path.

    Args:
        batch: or one loader's part of it.
        path: of it, in Python.
        possible: the numbers of samples that would explain all tensors, if there are several.
        rule: how it was to be cut.
        is_sequence_first: whether `batch_dim=1` would help.
    """
    shapes = {where: tuple(array.shape) for where, array in named_arrays(batch, rule, path)}
    shown = [f"{where} {shape}" for where, shape in shapes.items()]
    rest = f" and {len(shown) - MAX_SHAPES} more" if len(shown) > MAX_SHAPES else ""
    numbers = f"may have {' or '.join(map(str, sorted(possible)))} samples"
    problem = numbers if possible else "has tensors with different numbers of rows"
    advice = "HanayoStrategy(batch_dim=1) if it is sequence-first, or " if is_sequence_first else _whole(shapes, rule)
    return UnsupportedError(
        f"{path} {problem}, and can't be cut into micro-batches: {', '.join(shown[:MAX_SHAPES])}{rest}. "
        f"Use {advice}{SPLIT_BATCH}."
    )


def _whole(shapes: dict[str, tuple[int, ...]], rule: BatchRule) -> str:
    """Advice to leave the tensors whole whose rows differ from those of most others."""
    rows = {where: shape[rule.sample_dim(len(shape))] for where, shape in shapes.items() if shape}
    counts = Counter(rows.values()).most_common(2)
    odd = tuple(dict.fromkeys(_name(where) for where, size in rows.items() if size not in (counts[0][0], 1)))
    if "" in odd or not 0 < len(odd) <= 3 or (len(counts) == 2 and counts[0][1] == counts[1][1]):
        return ""
    return f"HanayoStrategy(whole={odd!r}) if all samples share {'it' if len(odd) == 1 else 'them'}, or "


def _uncuttable(what: str, path: str) -> UnsupportedError:
    whole = f", or HanayoStrategy(whole=({_name(path)!r},)) if all samples share it" if _name(path) else ""
    return UnsupportedError(f"{what}, which can't be cut into micro-batches. Use {SPLIT_BATCH}{whole}.")


def _name(path: str) -> str:
    """The key or field that a path ends with; "" for an index, and for the batch itself."""
    last = path.replace("]", "").replace("[", ".").rpartition(".")[2].strip("'")
    return "" if last.isdigit() or last == path else last


def _slots(cls: type) -> tuple[str, ...]:
    names = cls.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def named_arrays(value: Any, rule: BatchRule, path: str) -> Iterator[tuple[str, Any]]:
    """All tensors and arrays that may be cut, each with its key path."""
    if isinstance(value, Array):
        yield path, value
        return
    for key, item in (children(value) or {}).items():
        if not rule.keeps_whole(key):
            yield from named_arrays(item, rule, path + step_to(value, key))
