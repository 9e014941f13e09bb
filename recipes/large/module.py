"""Any causal language model of transformers, unmodified, by its type and its published sizes."""

from math import cos, pi
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_hanayo import chunk_loss


class CausalLM(L.LightningModule):
    """A causal language model that is trained with AdamW, a warm-up and a cosine decay to a tenth.

    The loss never holds whole logits: with a vocabulary of 128,256 those of a sequence of 8,192 tokens take 4.2 GB in
    fp32, several times.

    Args:
        model_type: of transformers, such as "llama".
        config: the sizes, under the names of its configuration.
        learning_rate: after the warm-up.
        warmup_steps: optimizer steps over which it rises from zero.
        decay_steps: optimizer steps at which it has fallen to a tenth.
        weight_decay: of matrices.
    """

    def __init__(
        self,
        model_type: str,
        config: dict[str, Any],
        learning_rate: float = 3e-4,
        warmup_steps: int = 2000,
        decay_steps: int = 100_000,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config = AutoConfig.for_model(model_type, **config | {"use_cache": False})
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        """Build the model; each rank gets the values of its own part."""
        if self.net is None:
            self.net = chunk_loss(AutoModelForCausalLM.from_config(self.config))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean cross-entropy of each token's next one. `input_ids` is [samples, context]."""
        assert self.net is not None
        loss: Tensor = self.net(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, in which only matrices decay."""
        kinds = [[one for one in self.parameters() if (one.dim() < 2) is is_small] for is_small in (False, True)]
        groups = [
            {"params": parameters, "weight_decay": decay}
            for parameters, decay in zip(kinds, (self.hparams["weight_decay"], 0.0), strict=True)
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"], betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_at)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _learning_rate_at(self, step: int) -> float:
        warmup, end = self.hparams["warmup_steps"], self.hparams["decay_steps"]
        if step < warmup:
            return float((step + 1) / warmup)
        return 0.1 + 0.45 * (1 + cos(pi * min(1.0, (step - warmup) / max(1, end - warmup))))
