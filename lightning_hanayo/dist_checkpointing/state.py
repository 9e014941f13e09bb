"""Encodes Python values as JSON and back, without pickle; tensors become numbers of a list.

    1, 0.5, "a", None, True, [1, 2]     as they are
    {"lr": 0.1}                         {"dict": {"lr": 0.1}}
    {3: (4, nan)}                       {"dict": [[3, {"tuple": [4, {"float": "nan"}]}]]}
    a tensor                            {"tensor": 0}

What is decoded equals what was encoded, to the bit, and has the same class. An object that is in two places becomes
two, and a `nn.Parameter` becomes a tensor.

Says what `state-<save id>.json` holds: all of Lightning's checkpoint but the tensors of model and optimizers.

checkpoint["state_dict"]            tensors: model/<name> in the manifest       names in order, other values: here
checkpoint["optimizer_states"]      tensors: optimizer/<i>/<parameter>/<key>    param groups, other values: here
checkpoint["loops"], ["callbacks"], ... all others                              here; their tensors: state/<n>
"""

import base64
import math
import re
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing.format import ImpossibleError, check_form, require
from lightning_hanayo.dist_checkpointing.tensor_file import dtype_name
from lightning_hanayo.errors import CheckpointError, UnsupportedError

_MAX_DEPTH = 100
_MAX_DIMS = 32
"""of NumPy's arrays"""
_MAX_INT = 2**63
"""Larger numbers are written as hexadecimal text: Python reads no decimal ones of more than 4,300 digits."""
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]+(\[[0-9]*[A-Za-z]+\])?")
_FACTORIES = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
"""of a defaultdict"""
_FACTORY_NAMES: Mapping[Any, str | None] = {kind: name for name, kind in _FACTORIES.items()} | {None: None}
_KNOWN = "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, tensors, NumPy values, dtypes, devices, "
_KNOWN += "paths, dates and durations"


@dataclass(frozen=True)
class DistributedTensor:
    """Stands for a tensor that this rank doesn't hold whole: others write it, or each rank its part."""

    path: tuple[Any, ...]
    """the keys that lead to it"""
    pipe_rank: int | None
    """the pipeline rank that holds it, maybe in parts; None: the ranks of this one's cube hold a part each"""


class DocumentError(CheckpointError):
    """A document that `encode` didn't make; it doesn't say which."""


def encode(value: Any, where: str) -> tuple[Any, list[Any]]:
    """Returns a value as JSON, and the tensors in it (a `DistributedTensor` as it is), in the order of their numbers.

    Args:
        where: what the value is, for messages: "callbacks".

    Example:
        >>> encode({"decay": 0.9, "mean": torch.zeros(2)}, "callbacks['EMA']")
        ({'dict': {'decay': 0.9, 'mean': {'tensor': 0}}}, [tensor([0., 0.])])

    Raises:
        UnsupportedError: an object of an unknown class is in it. The message says where: callbacks['EMA']['decay'].
        CheckpointError: a tensor in it has a dtype or layout that can't be stored.
    """
    tensors: list[Any] = []
    return _encode(value, where, tensors, 0), tensors


def decode(document: Any, get_tensor: Callable[[int], Tensor]) -> Any:
    """Returns the value that `encode` was given.

    Args:
        document: JSON, of any origin.
        get_tensor: returns the tensor with a number.

    Raises:
        DocumentError: `encode` didn't make this document, or a tensor is missing.
    """
    return _decode(document, get_tensor, 0)


@dataclass(frozen=True)
class _Codec:
    """How values of one class are made of simpler ones, and come back."""

    kind: type
    take_apart: Callable[[Any], Any]
    """returns values that can be encoded"""
    make: Callable[[Any], Any]


_CODECS: Mapping[str, _Codec] = {
    "tuple": _Codec(tuple, list, tuple),
    "set": _Codec(set, lambda value: sorted(value, key=repr), set),
    "frozenset": _Codec(frozenset, lambda value: sorted(value, key=repr), frozenset),
    "ordered_dict": _Codec(OrderedDict, dict, OrderedDict),
    "counter": _Codec(Counter, dict, lambda value: Counter(_typed(value, dict))),
    "default_dict": _Codec(
        defaultdict, lambda value: [_FACTORY_NAMES[value.default_factory], dict(value)],
        lambda value: defaultdict(None if value[0] is None else _FACTORIES[value[0]], _typed(value[1], dict))),
    "namespace": _Codec(Namespace, vars, lambda value: Namespace(**value)),
    "float": _Codec(float, repr, float),
    "int": _Codec(int, hex, lambda value: int(value, 16)),
    "complex": _Codec(complex, lambda value: [value.real, value.imag], lambda value: complex(*value)),
    "bytes": _Codec(
        bytes, lambda value: base64.b64encode(value).decode(), lambda value: base64.b64decode(value, validate=True)),
    "size": _Codec(torch.Size, list, torch.Size),
    "dtype": _Codec(
        torch.dtype, lambda value: str(value).removeprefix("torch."),
        lambda value: _typed(getattr(torch, _typed(value, str)), torch.dtype)),
    "device": _Codec(torch.device, str, lambda value: torch.device(_typed(value, str))),
    "path": _Codec(PurePath, str, lambda value: Path(_typed(value, str))),
    "date": _Codec(date, date.isoformat, date.fromisoformat),
    "datetime": _Codec(datetime, datetime.isoformat, datetime.fromisoformat),
    "timedelta": _Codec(
        timedelta, lambda value: [value.days, value.seconds, value.microseconds],
        lambda value: timedelta(value[0], value[1], value[2])),
    "number": _Codec(
        np.generic, lambda value: [_numpy_dtype(value), value.tobytes().hex()],
        lambda value: _array(value[0], [], bytes.fromhex(value[1]))[()]),
    "array": _Codec(
        np.ndarray, lambda value: [_numpy_dtype(value), list(value.shape), _bytes_of(value)],
        lambda value: _array(value[0], value[1], _typed(value[2], Tensor).numpy().tobytes())),
}  # fmt: skip
_TAGS = {codec.kind: tag for tag, codec in _CODECS.items()}
_FAMILIES = (PurePath, np.generic)
"""whose subclasses are stored alike"""


def _encode(value: Any, where: str, tensors: list[Any], depth: int) -> Any:
    """The value as JSON; tensors in it are added to the list."""
    if depth > _MAX_DEPTH:
        raise UnsupportedError(f"{where[:200]}... is nested more than {_MAX_DEPTH} deep, or contains itself")
    if value is None or type(value) in (bool, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is int and -_MAX_INT <= value < _MAX_INT:
        return value
    if type(value) is list:
        return [_encode(one, f"{where}[{index}]", tensors, depth + 1) for index, one in enumerate(value)]
    if type(value) is dict or type(value).__name__ == "AttributeDict":  # Lightning's, for hyperparameters
        items = [(key, _encode(one, f"{where}[{key!r}]", tensors, depth + 1)) for key, one in value.items()]
        if all(type(key) is str for key in value):
            return {"dict": dict(items)}
        return {"dict": [[_encode(key, f"the key {key!r} of {where}", tensors, depth + 1), one] for key, one in items]}
    if type(value) in (Tensor, nn.Parameter, DistributedTensor):
        if isinstance(value, Tensor):
            value = value.detach()
            if value.is_meta:
                raise UnsupportedError(f"{where} is a tensor without values, on the meta device")
            dtype_name(value, where)  # raises if it can't be stored
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    kind = next((family for family in _FAMILIES if isinstance(value, family)), type(value))
    try:
        tag = _TAGS[kind]
        simpler = _CODECS[tag].take_apart(value)
    except LookupError:
        raise UnsupportedError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which can't be stored without "
            f"pickle. Store what it is made of: {_KNOWN}"
        ) from None
    return {tag: _encode(simpler, where, tensors, depth + 1)}


def _decode(document: Any, get_tensor: Callable[[int], Tensor], depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH + 10:
        raise DocumentError(f"The document is nested more than {_MAX_DEPTH} deep")
    if isinstance(document, list):
        return [_decode(one, get_tensor, depth + 1) for one in document]
    if not isinstance(document, dict):
        return document
    if len(document) != 1:
        raise DocumentError(f"The document has {len(document)} kinds where one is expected")
    ((tag, content),) = document.items()
    try:
        if tag == "dict" and isinstance(content, dict):
            return {key: _decode(one, get_tensor, depth + 1) for key, one in content.items()}
        if tag == "dict":
            return dict(_typed(_decode(one, get_tensor, depth + 1), list) for one in _typed(content, list))
        if tag == "tensor":
            return get_tensor(_typed(content, int))
        return _CODECS[tag].make(_decode(content, get_tensor, depth + 1))
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DocumentError(f"The document has an impossible {str(tag)[:20]!r}: {str(error)[:200]}") from None


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _numpy_dtype(value: Any) -> str:
    """The name of a NumPy dtype. Raises a LookupError for objects and records, whose bytes aren't their values."""
    name: str = value.dtype.str
    if not _NUMPY_DTYPE.fullmatch(name):
        raise LookupError(name)
    return name


def _bytes_of(array: np.ndarray[Any, Any]) -> Tensor:
    """An array's bytes, one entry after another, in memory of their own."""
    return torch.from_numpy(np.array(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


def _array(dtype: Any, shape: Any, data: bytes) -> Any:
    """The array [*shape] with these bytes."""
    if not _NUMPY_DTYPE.fullmatch(_typed(dtype, str)) or len(_typed(shape, list)) > _MAX_DIMS:
        raise ValueError(f"no array has the dtype {dtype} and {len(shape)} dimensions")
    if any(_typed(size, int) < 0 for size in shape) or math.prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"{shape} in {dtype} doesn't have {len(data)} bytes")
    return np.ndarray(tuple(shape), np.dtype(dtype), bytearray(data))


STATE = "state"
"""the stem of the document's file"""
RUN = "lightning_hanayo"
"""the key of Lightning's dictionary under which is what a resumed run needs; a plain Trainer leaves it alone"""
WITHOUT_STATE = "without_state"
"""in an optimizer's state dict: the parameters that had no state when it was saved, while others had"""


def data_stem(data_rank: int) -> str:
    """The stem of the document of a data rank, which holds the states of its loaders."""
    return f"state-data-{data_rank:05}"


@dataclass(frozen=True)
class OptimizerDocument:
    """What is stored of an optimizer besides the tensors of its states."""

    class_name: str
    """such as torch.optim.adamw.AdamW"""
    param_groups: Sequence[Mapping[str, Any]]
    """as in `state_dict()`, but with names of parameters under "params" """
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """of each parameter's state what is no tensor, by parameter and key"""
    without_state: Sequence[str] = field(default_factory=list)
    """parameters that had no state when it was saved, while others had"""
    rest: Mapping[str, Any] = field(default_factory=dict)
    """what its `state_dict()` has besides states and groups"""


@dataclass(frozen=True)
class StateDocument:
    """What a checkpoint holds besides the tensors of model and optimizers.

    Example:
        >>> document = StateDocument.decode(folder.text(STATE), lambda n: folder.read(f"state/{n}"), "last.ckpt")
        >>> document.checkpoint["global_step"]
        1000
    """

    checkpoint: Mapping[str, Any]
    """Lightning's, without "state_dict" and "optimizer_states" """
    names: Sequence[str]
    """the keys of the state dict, in order"""
    tied: Mapping[str, str] = field(default_factory=dict)
    """of names that share another one's tensor: that one, under which it is stored"""
    values: Mapping[str, Any] = field(default_factory=dict)
    """entries of the state dict that are no tensors"""
    versions: Mapping[str, Any] = field(default_factory=dict)
    """`state_dict._metadata`: of each module the version of its entries"""
    optimizers: Sequence[OptimizerDocument] | None = None
    """None: no states of optimizers were saved"""

    def encode(self) -> tuple[Any, list[Any]]:
        """The document as JSON, and the tensors in it (a `DistributedTensor` as it is), in the order of their numbers.

        Raises:
            UnsupportedError: a value can't be stored without pickle.
        """
        optimizers = None if self.optimizers is None else [vars(one) for one in self.optimizers]
        return encode({**vars(self), "optimizers": optimizers}, "checkpoint")

    @staticmethod
    def decode(document: Any, get_tensor: Callable[[int], Tensor], where: str) -> "StateDocument":
        """Read what `encode` has made.

        Args:
            document: JSON.
            get_tensor: returns the tensor `state/<n>`.
            where: the file, for errors.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            found = decode(document, get_tensor)
            check_form(found, _FORM, "the document")
            check_form(found["optimizers"] or [], [_OPTIMIZER_FORM], "the optimizers")
            optimizers = found.pop("optimizers")
            listed = None if optimizers is None else [OptimizerDocument(**one) for one in optimizers]
            made = StateDocument(**found, optimizers=listed)
            stored = set(made.names) - made.tied.keys()
            require(stored.issuperset(made.tied.values()), "a name is tied to one that isn't stored")
        except (DocumentError, ImpossibleError, TypeError) as error:
            what = " ".join(str(error).split())  # a damaged key may have line breaks
            raise CheckpointError(f"{where} doesn't have the form of a state document: {what}.") from None
        return made


_ENTRIES = {str: object}
_FORM = {
    "checkpoint": _ENTRIES, "names": [str], "optimizers": object,
    "tied": ({str: str},), "values": (_ENTRIES,), "versions": (_ENTRIES,),
}  # fmt: skip
_OPTIMIZER_FORM = {
    "class_name": str, "param_groups": [{"params": [str]}],
    "values": ({object: {}},), "without_state": ([str],), "rest": ({},),
}  # fmt: skip
"""as `check_form` takes them"""
