"""BERT: a masked language model as an ordinary LightningModule, written like a user's own code."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.text import Perplexity


class Attention(nn.Module):
    """Bidirectional self-attention, [batch, length, width] to the same shape."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width={width} doesn't divide into num_heads={num_heads} heads")
        self.head_size = width // num_heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, length, width] to the same shape; tokens attend only where `mask` [batch, length] is True."""
        q, k, v = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        visible = None if mask is None else mask[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout)
        out: Tensor = self.out(heads.transpose(1, 2).flatten(-2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, length, features] to [batch, heads, length, head size]."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        return heads


class Block(nn.Module):
    """A transformer block with its norms behind: attention, then a feed-forward network four times as wide."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads, dropout)
        self.norm_1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, length, width] to the same; `mask` [batch, length] is False on padding."""
        x = self.norm_1(x + self.dropout(self.attention(x, mask)))
        out: Tensor = self.norm_2(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return out


class Head(nn.Module):
    """From features to logits, through a decoder that shares the token embedding's weight and has its own bias."""

    def __init__(self, token: nn.Embedding) -> None:
        super().__init__()
        vocab_size, width = token.weight.shape
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocab_size)
        self.decoder.weight = token.weight

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to [batch, length, vocabulary]."""
        logits: Tensor = self.decoder(self.norm(F.gelu(self.dense(x))))
        return logits


class BERT(L.LightningModule):
    """A BERT with learned positions, trained to find hidden tokens.

    Args:
        vocab_size: How many tokens there are, the mask's included; the data's vocabulary must not be larger.
        context: The longest sequence, in tokens.
        num_layers: How many blocks.
        width: Features per token.
        num_heads: Attention heads per block; must divide the width.
        dropout: Probability with which a feature is dropped in training, in the blocks and after the embedding.
        learning_rate: AdamW's learning rate at the warm-up's end.
        weight_decay: AdamW's weight decay, for matrices only: biases and norms don't decay.
        warmup_steps: Optimizer steps over which the learning rate rises from zero.
        decay_steps: The optimizer step at which it has fallen back to zero, in a straight line.
    """

    def __init__(
        self,
        vocab_size: int = 2048,
        context: int = 128,
        num_layers: int = 8,
        width: int = 128,
        num_heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        decay_steps: int = 1000,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.head = Head(self.token)
        self.perplexity = Perplexity(ignore_index=-100)
        self._initialize()

    def _initialize(self) -> None:
        """BERT's initial values: normal with deviation 0.02, biases zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [batch, length, vocabulary] of the token that belongs at each place of `input_ids` [batch, length].

        `attention_mask` [batch, length] is 0 or False on padding.
        """
        mask = None if attention_mask is None else attention_mask.bool()
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.norm(self.token(input_ids) + self.position(positions)))
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean cross-entropy per hidden token."""
        loss = cross_entropy(self._logits(batch), batch["labels"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the loss and the perplexity, each over the whole validation set."""
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the same as validation."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The likeliest token at each place, [batch, length]."""
        prediction: Tensor = self._logits(batch).argmax(-1)
        return prediction

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self(batch["input_ids"], batch.get("attention_mask"))
        return logits

    def _evaluate(self, batch: dict[str, Tensor], split: str) -> None:
        logits, labels = self._logits(batch), batch["labels"]
        self.perplexity(logits, labels)
        loss, size = cross_entropy(logits, labels), int((labels != -100).sum())
        self.log(f"{split}_loss", loss, prog_bar=True, batch_size=size, sync_dist=True)
        self.log(f"{split}_perplexity", self.perplexity, on_step=False, on_epoch=True, batch_size=size)

    def configure_optimizers(self) -> Any:
        """AdamW in two groups of parameters, those that decay and those that don't."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.hparams["weight_decay"]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_at)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _learning_rate_at(self, step: int) -> float:
        """The factor on the learning rate in the optimizer step `step`, counted from zero."""
        warmup, end = self.hparams["warmup_steps"], self.hparams["decay_steps"]
        if step < warmup:
            return float((step + 1) / warmup)
        return float(max(0, end - step) / max(1, end - warmup))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over tokens, of logits [batch, length, vocabulary] and labels [batch, length]; -100 doesn't count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
