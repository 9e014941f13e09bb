"""A small GPT on real text. Its blocks are registered here, so that `cube=...` parallelizes them whole."""

from typing import Any

from lightning_hanayo.tensor_parallel import BlockSpec, ProjectionGroup, register_block


def _head_size(attention: Any) -> int:
    return int(attention.qkv.in_features) // int(attention.num_heads)


_ATTENTION = ProjectionGroup(
    "attention", ("qkv",), head_size=_head_size, num_fused=3, sharded_counts=("num_heads",), dropout="dropout"
)

# By name: `module.py` stays an ordinary LightningModule, and importing this package imports no torch.
register_block(
    "recipes.gpt.module.Block",
    BlockSpec(
        streams=("x",),
        projections=(_ATTENTION, ProjectionGroup("", ("up",))),
        row_parallel=("attention.out", "down"),
    ),
)
