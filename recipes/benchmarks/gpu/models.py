"""The two models that are trained, as ordinary LightningModules, and how many operations a step of each takes."""

from dataclasses import dataclass
from typing import Literal

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.gpt.module import GPT

Kind = Literal["llama", "gpt"]
Precision = Literal["bf16-true", "bf16-mixed"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    width: int
    num_heads: int
    feed_forward: int
    num_blocks: int
    vocabulary: int = 0
    """of a GPT"""


class LlamaStack(L.LightningModule):
    """The blocks of a Llama, as transformers has them. It takes and returns hidden states [samples, seq, width]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        from transformers.models.llama.configuration_llama import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = LlamaConfig(
            hidden_size=sizes.width,
            intermediate_size=sizes.feed_forward,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_heads,
            num_hidden_layers=sizes.num_blocks,
            attn_implementation="sdpa",  # type: ignore[call-arg, unused-ignore]
        )
        self.rotary = LlamaRotaryEmbedding(config)
        self.blocks = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(sizes.num_blocks))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[samples, seq, width] to the same."""
        positions = self.rotary(x, torch.arange(x.shape[1], device=x.device).unsqueeze(0))
        for block in self.blocks:
            x = block(x, position_embeddings=positions)
        return x

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean square of what the stack returns: a loss that costs next to nothing."""
        loss: Tensor = self(batch).float().square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


Model = LlamaStack | GPT


def build(kind: Kind, sizes: Sizes, sequence: int, device: torch.device) -> Model:
    """Build the model on `device`, with the same values each time."""
    torch.manual_seed(1)
    with device:
        if kind == "llama":
            return LlamaStack(sizes)
        return GPT(sizes.vocabulary, sequence, sizes.num_blocks, sizes.width, sizes.num_heads)


def batch_of(
    kind: Kind, sizes: Sizes, shape: tuple[int, int], precision: Precision, device: torch.device
) -> Tensor | dict[str, Tensor]:
    """A batch of `shape` (samples, sequence) on `device`."""
    generator = torch.Generator(device).manual_seed(2)
    if kind == "llama":
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        return torch.randn(*shape, sizes.width, generator=generator, device=device, dtype=dtype)
    tokens = torch.randint(sizes.vocabulary, (shape[0], shape[1] + 1), generator=generator, device=device)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def operations(kind: Kind, sizes: Sizes, shape: tuple[int, int]) -> float:
    """Floating-point operations of forward and backward on a batch of `shape` (samples, sequence).

    Each token takes six per weight of a matrix, and 6 seq width per block in causal attention: 2 seq width forward for
    the products with keys and values, of which half is masked, and twice as many backward.
    """
    width, num_matrices = sizes.width, 3 if kind == "llama" else 2
    per_block = 4 * width**2 + num_matrices * width * sizes.feed_forward
    weights = sizes.num_blocks * per_block + sizes.vocabulary * width
    return float(shape[0] * shape[1] * (6 * weights + 6 * sizes.num_blocks * shape[1] * width))
