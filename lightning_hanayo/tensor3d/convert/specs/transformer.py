"""torch's own Transformer layers, norms in front or behind, batch or sequence first."""

from typing import Any

from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, Part


def _batch_first(block: Any) -> bool:
    return bool(block.self_attn.batch_first)


BLOCKS = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": BlockSpec(
        streams=("src",),
        parts=(Part("", ("linear1",)),),
        second=("linear2",),
        batch_first=_batch_first,
        functions=("activation",),
        sets={"activation_relu_or_gelu": 0},  # the fused kernel of evaluation reads all weights itself
    ),
    "torch.nn.modules.transformer.TransformerDecoderLayer": BlockSpec(
        streams=("tgt", "memory"),
        parts=(Part("", ("linear1",)),),
        second=("linear2",),
        batch_first=_batch_first,
        functions=("activation",),
    ),
}
