"""The models of the memory benchmark: the GPT recipe, and a Llama of transformers."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.benchmarks.memory_measured import Sizes
from recipes.gpt.module import GPT


class Llama(L.LightningModule):
    """`LlamaForCausalLM` as it is, trained with AdamW."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.net = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss: Tensor = self.net(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def make_model(sizes: Sizes) -> L.LightningModule:
    """The model of these sizes."""
    if sizes.model == "gpt":
        return GPT(sizes.words, sizes.context, sizes.blocks, sizes.width, sizes.heads)
    config = LlamaConfig(
        hidden_size=sizes.width,
        intermediate_size=llama_features(sizes.width),
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.context,
        vocab_size=sizes.words,
    )
    return Llama(config)


def llama_features(width: int) -> int:
    """Of the feed-forward networks: 8/3 of the width, in eights."""
    return 8 * width // 3 // 8 * 8
