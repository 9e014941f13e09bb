"""The registry of blocks that are parallelized whole, by class name: what isn't installed needn't be imported."""

from typing import TYPE_CHECKING

from lightning_hanayo.tensor3d.convert.specs import huggingface, pytorch
from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, class_name

if TYPE_CHECKING:
    from torch import nn

_BLOCKS: dict[str, BlockSpec] = {**pytorch.BLOCKS, **huggingface.BLOCKS}


def register_block(block: "type[nn.Module] | str", spec: BlockSpec) -> None:
    """Register a class of blocks: a stack of them is parallelized whole, in its own code.

    Example:
        >>> up = ProjectionGroup("", ("up",))
        >>> register_block(Block, BlockSpec(streams=("x",), projections=(up,), row_parallel=("down",)))

    Args:
        block: the class, or its qualified name, as "my_package.models.Block". Subclasses don't count.
        spec: describes it.
    """
    _BLOCKS[block if isinstance(block, str) else class_name(block)] = spec


def block_spec(block: "nn.Module") -> BlockSpec | None:
    """Returns the spec of a block if exactly its class is registered."""
    return _BLOCKS.get(class_name(type(block)))
