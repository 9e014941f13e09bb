"""A small BERT on real text. Its blocks are registered here, so that `cube=...` parallelizes them whole."""

from lightning_hanayo.tensor_parallel import BlockSpec, ProjectionGroup, register_block

_ATTENTION = ProjectionGroup(
    "attention", ("query", "key", "value"), input="x", head_size="head_size", dropout="dropout"
)

# By name: `module.py` stays an ordinary LightningModule, and importing this package imports no torch.
register_block(
    "recipes.bert.module.Block",
    BlockSpec(
        streams=("x",),
        projections=(_ATTENTION, ProjectionGroup("", ("up",))),
        row_parallel=("attention.out", "down"),
    ),
)
