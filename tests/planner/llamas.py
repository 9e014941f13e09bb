"""Facts of Llamas, written down, so that tests of the planner need no torch."""

from lightning_hanayo.divisibility import Divisibility
from lightning_hanayo.planner.communication_volume import LinearLayer
from lightning_hanayo.planner.model_facts import BlockFacts, Code, ModelFacts

LENGTH, WORDS = 4096, 32000


def llama(blocks: int, hidden: int, features: int, heads: int, kv_heads: int) -> ModelFacts:
    """In bf16, with main gradients, master weights and Adam in fp32; sequences of 4,096 tokens."""
    kv = hidden // heads * kv_heads
    layers = (
        LinearLayer(LENGTH, hidden, hidden + 2 * kv),
        LinearLayer(LENGTH, hidden, hidden, row_parallel=True),
        LinearLayer(LENGTH, hidden, 2 * features),
        LinearLayer(LENGTH, features, hidden, row_parallel=True),
    )
    block = BlockFacts(
        layers,
        parameters=hidden * (2 * hidden + 2 * kv + 3 * features),
        attention_flops=4.0 * LENGTH * LENGTH * hidden,
        traffic=2.0 * LENGTH * (20 * hidden + 6 * features),
        calls=40,
        saved=1.9e5 * hidden,
    )
    required = (
        Divisibility("layers.0.self_attn.q_proj", "heads", heads, "yz"),
        Divisibility("layers.0.self_attn.k_proj", "key heads", kv_heads, "yz"),
        Divisibility("layers.0.mlp.up_proj", "features", features, "yz"),
        Divisibility("layers.0.norm", "hidden features", hidden, "z"),
    )
    return ModelFacts(
        stack="layers",
        blocks=(block,) * blocks,
        message=2.0 * LENGTH * hidden,
        outside_parameters=2 * WORDS * hidden,
        computing_parameters=WORDS * hidden,
        outside=Code(
            flops=2.0 * LENGTH * WORDS * hidden,
            traffic=8.0 * LENGTH * WORDS,
            calls=26,
            saved=6.0 * LENGTH * WORDS,
            workspace=8.0 * LENGTH * WORDS,
        ),
        required=required,
        tokens=LENGTH,
        dtype="bfloat16",
        element=2,
        parameter_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
    )


SEVEN_B = llama(32, 4096, 11008, 32, 32)
SEVENTY_B = llama(80, 8192, 28672, 64, 8)
