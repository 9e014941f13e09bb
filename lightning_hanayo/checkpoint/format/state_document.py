"""Says what `state-<save id>.json` holds: all of Lightning's checkpoint but the tensors of model and optimizers.

checkpoint["state_dict"]            tensors: model/<name> in the manifest       names in order, other values: here
checkpoint["optimizer_states"]      tensors: optimizer/<i>/<parameter>/<key>    param groups, other values: here
checkpoint["loops"], ["callbacks"], ... all others                              here; their tensors: state/<n>
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_hanayo.checkpoint.format.plain_values import DocumentError, decode, encode
from lightning_hanayo.errors import CheckpointError

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

    @property
    def _is_possible(self) -> bool:
        name, groups, values = self.class_name, self.param_groups, self.values
        kinds: tuple[tuple[Any, type], ...] = (name, str), (groups, list), (values, dict)
        if not all(isinstance(one, kind) for one, kind in kinds):
            return False
        dicts = (*groups, *values.values(), self.rest)
        lists = (self.without_state, *(one.get("params") for one in groups if isinstance(one, dict)))
        return all(isinstance(one, dict) for one in dicts) and all(_are_names(one) for one in lists)


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
            optimizers = found.pop("optimizers")
            listed = None if optimizers is None else [OptimizerDocument(**one) for one in optimizers]
            made = StateDocument(**found, optimizers=listed)
        except (AttributeError, DocumentError, KeyError, TypeError) as error:
            raise CheckpointError(f"{where} doesn't have the form of a state document: {error}.") from None
        if not made._is_possible:
            raise CheckpointError(f"{where} doesn't have the form of a state document.")
        return made

    @property
    def _is_possible(self) -> bool:
        mappings = (self.checkpoint, self.tied, self.values, self.versions)
        if not all(isinstance(one, dict) and _are_names([*one]) for one in mappings):
            return False
        if not _are_names(self.names) or not _are_names([*self.tied.values()]):
            return False
        stored = set(self.names) - self.tied.keys()
        return stored.issuperset(self.tied.values()) and all(one._is_possible for one in self.optimizers or ())


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
