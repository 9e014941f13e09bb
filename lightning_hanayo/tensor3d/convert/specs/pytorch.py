"""The specs of torch's own Transformer layers, with norms in front or behind, batch or sequence first."""

from typing import Any

from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, ProjectionGroup


def _batch_first(block: Any) -> bool:
    return bool(block.self_attn.batch_first)


BLOCKS = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": BlockSpec(
        streams=("src",),
        projections=(ProjectionGroup("", ("linear1",)),),
        row_parallel=("linear2",),
        batch_first=_batch_first,
        elementwise_functions=("activation",),
        overrides={"activation_relu_or_gelu": 0},  # the fused kernel of evaluation reads all weights itself
    ),
    "torch.nn.modules.transformer.TransformerDecoderLayer": BlockSpec(
        streams=("tgt", "memory"),
        projections=(ProjectionGroup("", ("linear1",)),),
        row_parallel=("linear2",),
        batch_first=_batch_first,
        elementwise_functions=("activation",),
    ),
}
