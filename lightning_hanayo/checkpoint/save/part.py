"""What one rank writes of a checkpoint: its tensors, its JSON documents, and rank 0 what the manifest says of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lightning_hanayo.checkpoint.format.region import Region

Kind = Literal["model", "optimizer", "state"]
"""which of a rank's files a tensor is in"""


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor of the single-process model, or all of it.

    Example:
        >>> rows = torch.randn(2, 8)  # rows 2 and 3 of a weight [4, 8]
        >>> TensorPart("model/head.weight", rows, (4, 8), Region((((2, 4),), ((0, 8),))), "model")
    """

    name: str
    """as in the manifest: model/<name>, optimizer/<i>/<parameter>/<key>, gradient/<parameter>, or state/<n>"""
    tensor: Tensor
    """[region.shape], on any device"""
    shape: tuple[int, ...]
    """of the whole tensor"""
    region: Region
    """the entries of the whole that `tensor` holds, in its order"""
    kind: Kind

    @staticmethod
    def whole(name: str, tensor: Tensor, kind: Kind) -> "TensorPart":
        """A tensor that one rank writes alone."""
        return TensorPart(name, tensor, tuple(tensor.shape), Region.whole(tensor.shape), kind)

    @property
    def num_bytes(self) -> int:
        """Of the part."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class RankPart:
    """What one rank writes. It belongs to the save: only the tensors may change once `Saver.save` has returned.

    No two ranks have the same entries of a tensor, nor documents of the same stem.
    """

    tensors: Sequence[TensorPart] = ()
    texts: Mapping[str, Any] = field(default_factory=dict)
    """JSON documents by the stem of their file: "state", "state-data-00001" """
    about: Mapping[str, Any] = field(default_factory=dict)
    """rank 0's: step, epoch, layout, and what else the manifest says of the whole checkpoint"""

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(part.num_bytes for part in self.tensors)
