"""Sequences of lengths that y doesn't divide, which change from batch to batch, train as in one process in any cube.

length 7 over y = 2     4 + 4 positions, of which one is padding
length 8 in one batch    5 + 5, of which two are: the size of a part tells the length
"""

from itertools import product

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from lightning_hanayo.tensor_parallel import BlockSpec, Mesh, ProjectionGroup, StageContext, register_block
from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
from tests.harness import models
from tests.harness.fake_groups import fake_world
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, run

WIDTH, HEADS = 24, 12


class TwoTexts(models.Trained):
    """Blocks of two residual streams: the labels' tokens, and a memory of another length."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, models.VOCABULARY)

    def loss(self, batch: Batch) -> Tensor:
        x, memory = self.embedding(batch["input_ids"]), self.embedding(batch["memory"])
        x = self.run_blocks(x, memory, batch["memory"] < 2)
        return cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten(), ignore_index=models.IGNORED)

    def run_blocks(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, memory, memory_key_padding_mask=padding)
        return x


class CrossBlock(nn.Module):
    """Registered: `nn.MultiheadAttention` to a memory, whose query is normed while its keys aren't."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=0.0)
        self.own = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor, memory_key_padding_mask: Tensor | None = None) -> Tensor:
        x = x + self.own(self.norm(x), x, x, need_weights=False)[0]
        return x + self.cross(x, memory, memory, memory_key_padding_mask, need_weights=False)[0]


class JointBlock(nn.Module):
    """Registered: writes to both streams, with linear layers of its own, and returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        q, k, v = (one.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (q, k, v))
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x, memory + self.down(gelu(self.up(memory)))


class Joint(TwoTexts):
    """The last block's memory counts, too."""

    def run_blocks(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        for block in self.blocks:
            x, memory = block(x, memory)
        return x + memory.masked_fill(padding.unsqueeze(-1), 0).sum(1, keepdim=True)


class OwnMemories(TwoTexts):
    """Each block gets a memory of its own, of another length."""

    def run_blocks(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, memory[:, i:], memory_key_padding_mask=padding[:, i:])
        return x


register_block(CrossBlock, BlockSpec(("x", "memory"), (), ()))
register_block(
    JointBlock,
    BlockSpec(
        ("x", "memory"),
        (
            ProjectionGroup("", ("query",), head_size=lambda block: WIDTH // HEADS),
            ProjectionGroup("", ("key",), head_size=lambda block: WIDTH // HEADS),
            ProjectionGroup("", ("value",), head_size=lambda block: WIDTH // HEADS),
            ProjectionGroup("", ("up",)),
        ),
        ("out", "down"),
    ),
)


def decoder() -> LightningModule:
    layers = (nn.TransformerDecoderLayer(WIDTH, HEADS, 36, dropout=0.0, batch_first=True) for _ in range(4))
    return TwoTexts(*layers)


def cross() -> LightningModule:
    return TwoTexts(*(CrossBlock() for _ in range(4)))


def joint() -> LightningModule:
    return Joint(*(JointBlock() for _ in range(4)))


def memories() -> LightningModule:
    return OwnMemories(*(CrossBlock() for _ in range(4)))


def pairs_of_texts() -> list[Batch]:
    """Texts of other lengths in each batch, and memories; those of 7 and 8 positions have parts of one size."""
    texts, memories = models.texts((5, 8, 4), (7, 4, 5)), models.texts((5, 8, 4), (8, 11, 4))
    return [text | {"memory": memory["input_ids"]} for text, memory in zip(texts, memories, strict=True)]


KINDS = {"decoder": decoder, "cross": cross, "joint": joint, "memories": memories}
LAYOUTS = [
    Layout(cube=(1, 2, 1), num_microbatches=2),
    Layout(cube=(1, 3, 1), num_microbatches=2),
    Layout(cube=(2, 2, 1), num_microbatches=2),
    Layout(cube=(1, 2, 2), num_microbatches=2, outside="replicate"),
    Layout(2, 1, 1, num_microbatches=2, cube=(1, 2, 1), recompute="blocks"),
    Layout(2, 1, 1, num_microbatches=4, cube=(1, 2, 1), pairs=True),
]
TRAININGS = {
    kind: Training(model, pairs_of_texts, torch.float64, steps=3, clip=0.1, loss_weight="tokens")
    for kind, model in KINDS.items()
}


@pytest.mark.parametrize(("kind", "layout"), covered(product(KINDS, LAYOUTS), by=[("joint", LAYOUTS[0])]), ids=str)
def test_streams_of_different_lengths(pool: Pool, kind: str, layout: Layout) -> None:
    outcome, expected = run(pool, TRAININGS[kind], layout), plain(pool, TRAININGS[kind])
    assert_close(outcome.gradients, expected.gradients, 1e-9)
    assert_close(outcome.weights, expected.weights, 1e-9)
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)


def test_compiled_blocks_know_the_lengths_of_both_streams() -> None:
    torch.compiler.reset()
    with fake_world(0, 2):
        context, block = StageContext(Mesh.create((1, 2, 1))), JointBlock()
        plan_parallelize([block], "blocks", (1, 2, 1)).install([block], context)
        block.compile(backend="eager", fullgraph=True)
        for lengths, sizes in (((7, 8), (4, 5)), ((8, 4), (4, 2)), ((5, 11), (3, 6))):
            context.before_forward(*lengths)
            made = block(*(torch.randn(2, size, WIDTH) for size in sizes))
            assert tuple(one.shape[1] for one in made) == sizes
