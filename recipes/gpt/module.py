"""GPT: a decoder-only language model as an ordinary LightningModule, written like a user's own code."""

import math
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.text import Perplexity


class Attention(nn.Module):
    """Causal self-attention, [batch, context, width] to the same shape."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width={width} doesn't divide into num_heads={num_heads} heads")
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, context, width] to the same."""
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(heads.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """A transformer block with its norms in front: attention, then a feed-forward network four times as wide."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, context, width] to the same."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))
        return out


class GPT(L.LightningModule):
    """A GPT with learned positions, whose head shares the token embedding's weight.

    Args:
        vocab_size: How many tokens there are; the data's vocabulary must not be larger.
        context: The longest sequence, in tokens.
        num_layers: How many blocks.
        width: Features per token.
        num_heads: Attention heads per block; must divide the width.
        dropout: Probability with which a feature is dropped in training, in the blocks and after the embedding.
        learning_rate: AdamW's learning rate after the warm-up.
        weight_decay: AdamW's weight decay, for matrices only: biases and norms don't decay.
        betas: AdamW's averaging coefficients.
        warmup_steps: Optimizer steps over which the learning rate rises from zero.
        decay: What the learning rate does after the warm-up: stay constant, or fall to a tenth along a cosine.
        decay_steps: The optimizer step at which the cosine ends.
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
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        decay: Literal["constant", "cosine"] = "constant",
        decay_steps: int = 1000,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.perplexity = Perplexity(ignore_index=-100)
        # for summaries and FLOP/s; it has values when the model is built on the meta device, too
        self.example_input_array = torch.zeros(1, context, dtype=torch.long, device="cpu")
        self._initialize(num_layers)

    def _initialize(self, num_layers: int) -> None:
        """GPT-2's initial values: normal with deviation 0.02, smaller where a block writes into the residual sum."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, context, vocabulary] of the token that follows each of `input_ids` [batch, context]."""
        return F.linear(self.hidden(input_ids), self.token.weight)

    def hidden(self, input_ids: Tensor) -> Tensor:
        """What the head makes logits of, [batch, context, width]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.token(input_ids) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        hidden: Tensor = self.norm(x)
        return hidden

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean cross-entropy per token."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """What training minimises: the mean cross-entropy per token."""
        return cross_entropy(self(batch["input_ids"]), batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the loss and the perplexity, each over the whole validation set."""
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the same as validation."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The likeliest next token after each token, [batch, context]."""
        prediction: Tensor = self(batch["input_ids"]).argmax(-1)
        return prediction

    def _evaluate(self, batch: dict[str, Tensor], split: str) -> None:
        logits = self(batch["input_ids"])
        self.perplexity(logits, batch["labels"])
        loss, size = cross_entropy(logits, batch["labels"]), len(logits)
        self.log(f"{split}_loss", loss, prog_bar=True, batch_size=size, sync_dist=True)
        self.log(f"{split}_perplexity", self.perplexity, on_step=False, on_epoch=True, batch_size=size)

    def configure_optimizers(self) -> Any:
        """AdamW in two groups of parameters, those that decay and those that don't."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.hparams["weight_decay"]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"], betas=tuple(self.hparams["betas"]))
        if self.hparams["warmup_steps"] == 0 and self.hparams["decay"] == "constant":
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_at)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _learning_rate_at(self, step: int) -> float:
        """The factor on the learning rate in the optimizer step `step`, counted from zero."""
        warmup, end = self.hparams["warmup_steps"], self.hparams["decay_steps"]
        if step < warmup:
            return float((step + 1) / warmup)
        if self.hparams["decay"] == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, end - warmup))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over tokens, of logits [batch, context, vocabulary] and labels [batch, context]; -100 doesn't count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
