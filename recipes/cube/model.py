"""A small language model built of 3-D layers, and its training without Lightning, on any mesh.

ids [batch/x, seq]  --Embedding3D-->  [batch/x, seq/y, h/z]  --blocks-->  [batch/x, seq/y, h/z]
                    --Head3D-->  [batch/x, seq, V/(y z)]  --cross_entropy3d-->  the loss, the same on all ranks

Each rank gets the samples of its x, and whole sequences: ranks that differ along y and z only get the same.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from lightning_hanayo.tensor_parallel import (
    Embedding3D,
    FeedForward3D,
    Head3D,
    LayerNorm3D,
    MultiheadAttention3D,
    RMSNorm3D,
    StageContext,
    SwiGLU3D,
    all_reduce_partial_gradients,
    cross_entropy3d,
)

Kind = Literal["gpt", "llama"]


class Block(nn.Module):
    """Causal attention and a feed-forward network, with norms in front: LayerNorm and GELU, or RMSNorm and SwiGLU."""

    def __init__(self, width: int, num_heads: int, kind: Kind, context: StageContext) -> None:
        super().__init__()
        norm = LayerNorm3D if kind == "gpt" else RMSNorm3D
        feed_forward = FeedForward3D if kind == "gpt" else SwiGLU3D
        self.norm_1 = norm(width, context=context)
        self.attention = MultiheadAttention3D(width, num_heads, batch_first=True, context=context)
        self.norm_2 = norm(width, context=context)
        self.feed_forward = feed_forward(width, 2 * width, context=context)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[batch/x, seq/y, width/z] to the same; mask [seq, seq]."""
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        out: Tensor = x + self.feed_forward(self.norm_2(x))
        return out


class LanguageModel(nn.Module):
    """A decoder whose head shares the embedding's parameter.

    Args:
        vocabulary: the number of tokens; any size.
        width: features of the residual stream.
        num_heads: of each attention.
        num_layers: the number of blocks.
        kind: of the blocks.
        context: what the layers share, with the mesh.
    """

    def __init__(
        self, vocabulary: int, width: int, num_heads: int, num_layers: int, *, kind: Kind, context: StageContext
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = Embedding3D(vocabulary, width, context=context)
        self.blocks = nn.ModuleList(Block(width, num_heads, kind, context) for _ in range(num_layers))
        self.head = Head3D(width, vocabulary, bias=False, context=context)
        self.head.register_parameter("weight", self.embedding._parameters["weight"])

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy over the tokens of all ranks, of ids and labels [batch/x, seq]."""
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, mask)
        return cross_entropy3d(self.head(x), labels, self.head.vocabulary, self.context.mesh)


def train(model: LanguageModel, ids: Tensor, labels: Tensor, num_steps: int) -> list[float]:
    """Train on one batch, whole on each rank, and return the loss of each step. All ranks of the mesh call it."""
    axis = model.context.mesh.axis("x")
    own_ids, own_labels = (whole.chunk(axis.size)[axis.rank] for whole in (ids, labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(num_steps):
        model.context.begin_batch()  # weights have changed: drop what was gathered ahead
        loss = model.loss(own_ids, own_labels)
        optimizer.zero_grad()
        loss.backward()
        all_reduce_partial_gradients(model, model.context.mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses
