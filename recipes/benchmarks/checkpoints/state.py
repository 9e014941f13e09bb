"""Makes the tensors that a pipeline rank saves: the weights of its Transformer blocks, and Adam's states of them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

BLOCKS = 8
"""in the whole model, divided among the ranks"""
ADAM = ("exp_avg", "exp_avg_sq")
_PARAMETERS = {
    "attention.qkv.weight": (3, 1),
    "attention.qkv.bias": (3,),
    "attention.out.weight": (1, 1),
    "attention.out.bias": (1,),
    "mlp.up.weight": (4, 1),
    "mlp.up.bias": (4,),
    "mlp.down.weight": (1, 4),
    "mlp.down.bias": (1,),
    "norm1.weight": (1,),
    "norm1.bias": (1,),
    "norm2.weight": (1,),
    "norm2.bias": (1,),
}
"""of a block, with their shapes in units of the width"""


@dataclass(frozen=True)
class Sizes:
    """The size of the model.

    Args:
        width: features of a block's input. A block has 12 width^2 weights, and Adam twice as many values.
    """

    width: int

    @staticmethod
    def of_bytes(num_bytes: float) -> "Sizes":
        """The model whose weights and Adam states together have about this size in fp32."""
        per_width = BLOCKS * 12 * (1 + len(ADAM)) * 4
        return Sizes(max(4, round(math.sqrt(num_bytes / per_width) / 4) * 4))

    def shapes(self, blocks: range) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors of some blocks, as our manifest names them."""
        for block in blocks:
            for parameter, units in _PARAMETERS.items():
                name, shape = f"blocks.{block}.{parameter}", tuple(unit * self.width for unit in units)
                yield f"model/{name}", shape
                yield from ((f"optimizer/0/{name}/{key}", shape) for key in ADAM)
                yield f"optimizer/0/{name}/step", ()


def blocks_of(rank: int, num_ranks: int) -> range:
    """The blocks that a rank holds.

    Example:
        >>> blocks_of(1, 4)
        range(2, 4)
    """
    return range(rank * BLOCKS // num_ranks, (rank + 1) * BLOCKS // num_ranks)


class State:
    """The tensors of one rank."""

    def __init__(self, sizes: Sizes, rank: int, num_ranks: int) -> None:
        random = torch.Generator().manual_seed(rank)
        self.tensors: Mapping[str, Tensor] = {
            name: torch.randn(shape, generator=random) for name, shape in sizes.shapes(blocks_of(rank, num_ranks))
        }

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def change(self) -> None:
        """Change all values in place, as an optimizer's step does."""
        for tensor in self.tensors.values():
            tensor.neg_()

    def spoil(self) -> None:
        """Overwrite all values, so that what a load leaves out is seen."""
        for tensor in self.tensors.values():
            tensor.fill_(math.nan)

    def digest(self) -> str:
        """A hash of all values."""
        state = xxhash.xxh3_128()
        for tensor in self.tensors.values():
            state.update(tensor.view(-1).numpy().data)
        return state.hexdigest()
