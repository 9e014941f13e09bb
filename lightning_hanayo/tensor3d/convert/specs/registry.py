"""The tables of kinds, by the names of classes: what isn't installed needn't be imported. Users add to both."""

from torch import nn

from lightning_hanayo.tensor3d.convert.specs import bert, gpt2, llama, recipes, transformer
from lightning_hanayo.tensor3d.convert.specs.layers import LAYERS, LayerSpec, SpreadModule
from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, class_name

_BLOCKS: dict[str, BlockSpec] = {
    **transformer.BLOCKS,
    **gpt2.BLOCKS,
    **bert.BLOCKS,
    **llama.BLOCKS,
    **recipes.BLOCKS,
}


def register_block(kind: type[nn.Module], description: BlockSpec) -> None:
    """Make a class of blocks known: they run wholly over the grid, in their own code.

    Example:
        >>> attention = Part("attention", ("qkv",), head_size="head_size", fused=3, local=("num_heads",))
        >>> register_block(Block, BlockSpec(("x",), (attention, Part("", ("up",))), ("attention.out", "down")))
    """
    _BLOCKS[class_name(kind)] = description


def register_layer(kind: type[nn.Module], spread: SpreadModule) -> None:
    """Make a class of layers known, as they may stand anywhere in a known block.

    Example:
        >>> register_layer(MyRMSNorm, partial(spread_rms_norm, eps=1e-6))
        >>> register_layer(Swish, leave)
    """
    LAYERS[class_name(kind)] = LayerSpec(spread)


def block_kind(block: nn.Module) -> BlockSpec | None:
    """The kind of a block, if it has one: exactly its class counts."""
    return _BLOCKS.get(class_name(type(block)))
