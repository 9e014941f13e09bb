"""The models, their sizes, and one block of each, built by transformers without values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama of arXiv 2307.09288, table 1, at a sequence length of 4,096."""

    name: str
    num_blocks: int
    hidden: int
    features: int
    heads: int
    kv_heads: int
    vocabulary: int = 32000
    length: int = 4096

    @property
    def block_parameters(self) -> int:
        """The matrices of one block: of attention, and of the feed-forward network."""
        kv = self.hidden // self.heads * self.kv_heads
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.features)

    @property
    def outside_parameters(self) -> int:
        """Embedding and head."""
        return 2 * self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All but the norms' gains."""
        return self.num_blocks * self.block_parameters + self.outside_parameters

    @property
    def head_flops(self) -> int:
        """Of the head and its backward, per token."""
        return 6 * self.vocabulary * self.hidden

    def block(self) -> nn.Module:
        """A block on the meta device, in bf16."""
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        with torch.device("meta"):
            block: nn.Module = LlamaDecoderLayer(self._config, 0).bfloat16()
        return block

    def rotary(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, on the meta device."""
        size = (1, self.length, self.hidden // self.heads)
        return torch.empty(size, device="meta", dtype=torch.bfloat16), torch.empty(
            size, device="meta", dtype=torch.bfloat16
        )

    @property
    def _config(self) -> Any:
        from transformers import AttentionInterface, LlamaConfig

        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.features,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
        )
        AttentionInterface.register(_FLASH, _flash_attention)
        config._attn_implementation = _FLASH
        return config


_FLASH = "flash attention without values"


def _flash_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """What `scaled_dot_product_attention` runs on a GPU. On the meta device it would choose another path itself."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return y.transpose(1, 2), None


MODELS = {model.name: model for model in (Llama("7B", 32, 4096, 11008, 32, 32), Llama("70B", 80, 8192, 28672, 64, 8))}
