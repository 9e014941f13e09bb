"""Direct preference optimization (Rafailov et al. 2023) of a GPT with adapters, as an ordinary LightningModule.

The reference is the same stack without its adapters, so there is no second copy of the model:

    no gradient    blocks(x, adapted=False)    log-probabilities of the reference
    gradient       blocks(x, adapted=True)     log-probabilities of the policy
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.gpt.module import GPT
from recipes.gpt.module import Block as PlainBlock


class Block(PlainBlock):
    """A block with an adapter of low rank on its output, which begins as zero and can be left out."""

    def __init__(self, width: int, num_heads: int, dropout: float, rank: int) -> None:
        super().__init__(width, num_heads, dropout)
        self.adapter_down = nn.Linear(width, rank, bias=False)
        self.adapter_up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.adapter_up.weight)

    def forward(self, x: Tensor, adapted: bool = True) -> Tensor:
        """[batch, context, width] to the same."""
        x = super().forward(x)
        return x + self.adapter_up(self.adapter_down(x)) if adapted else x


class DPO(GPT):
    """Trains the adapters of a GPT on pairs of answers, of which one is preferred.

    Args:
        rank: Of the adapters.
        beta: How strongly the policy is held to the reference: the smaller, the less.
        options: As for `GPT`.
    """

    def __init__(self, rank: int = 8, beta: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters()
        width, heads, dropout = (self.hparams[name] for name in ("width", "num_heads", "dropout"))
        for index, block in enumerate(self.blocks):
            adapted = Block(width, heads, dropout, rank)
            adapted.load_state_dict(block.state_dict(), strict=False)
            self.blocks[index] = adapted
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "adapter" in name

    def logits(self, input_ids: Tensor, *, adapted: bool) -> Tensor:
        """[batch, context] to [batch, context, vocabulary]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.token(input_ids) + self.position(positions))
        for block in self.blocks:
            x = block(x, adapted)
        return F.linear(self.norm(x), self.token.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the policy."""
        return self.logits(input_ids, adapted=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean of -log sigmoid(beta * margin) over pairs."""
        margin = self._margin(batch)
        loss = -F.logsigmoid(self.hparams["beta"] * margin).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the loss, the margin, and the share of pairs in which the preferred answer is ahead."""
        margin = self._margin(batch)
        loss = -F.logsigmoid(self.hparams["beta"] * margin).mean()
        values = {"val_loss": loss, "val_margin": margin.mean(), "val_preferred": (margin > 0).float().mean()}
        self.log_dict(values, batch_size=len(margin), sync_dist=True)

    def _margin(self, batch: dict[str, Tensor]) -> Tensor:
        """How much more than the reference the policy prefers the chosen answer, in nats, [pairs]."""
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        is_answer = torch.cat([batch["is_answer"], batch["is_answer"]])[:, 1:]
        with torch.no_grad():
            reference = _log_probability(self.logits(tokens, adapted=False), tokens, is_answer)
        chosen, rejected = (_log_probability(self(tokens), tokens, is_answer) - reference).chunk(2)
        return chosen - rejected


def _log_probability(logits: Tensor, tokens: Tensor, is_answer: Tensor) -> Tensor:
    """Of each row's answer, [rows]: the sum over its tokens. Of logits [rows, context, vocabulary]."""
    each = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (each * is_answer).sum(-1)
