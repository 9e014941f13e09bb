"""SmolLM2-135M as a LightningModule around the unmodified `LlamaForCausalLM` of transformers."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


class SmolLM2(L.LightningModule):
    """A causal language model. The defaults are the sizes of SmolLM2-135M (134,515,008 parameters).

    Args:
        vocab_size: How many tokens there are.
        context: The longest sequence, in tokens.
        num_layers: How many blocks.
        width: Features per token.
        feed_forward: Features inside a block's feed-forward network.
        num_heads: Attention heads per block.
        num_key_value_heads: Heads of keys and values; each serves several attention heads.
        lora_rank: Train low-rank changes of the attention's projections alone, of this rank; 0: train everything.
        learning_rate: AdamW's learning rate after the warm-up.
        warmup_steps: Optimizer steps over which the learning rate rises from zero.
    """

    def __init__(
        self,
        vocab_size: int = 49152,
        context: int = 8192,
        num_layers: int = 30,
        width: int = 576,
        feed_forward: int = 1536,
        num_heads: int = 9,
        num_key_value_heads: int = 3,
        lora_rank: int = 0,
        learning_rate: float = 3e-4,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config = LlamaConfig(
            vocab_size=vocab_size,
            max_position_embeddings=context,
            num_hidden_layers=num_layers,
            hidden_size=width,
            intermediate_size=feed_forward,
            num_attention_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            rms_norm_eps=1e-5,
            initializer_range=width**-0.5,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        self.net: LlamaForCausalLM | None = None

    def configure_model(self) -> None:
        """Build the model. With `init_from` this runs on the meta device, and each rank reads its own tensors."""
        if self.net is None:
            self.net = LlamaForCausalLM(self.config)
            if self.hparams["lora_rank"]:
                add_lora(self.net, self.hparams["lora_rank"])

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, context, vocabulary] of the token that follows each of `input_ids` [batch, context]."""
        assert self.net is not None
        logits: Tensor = self.net(input_ids=input_ids).logits
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean cross-entropy per token."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the loss over the whole validation set."""
        size = len(batch["input_ids"])
        self.log("val_loss", self._loss(batch), prog_bar=True, batch_size=size, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW over what is trained, with a warm-up."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams["learning_rate"], betas=(0.9, 0.95))
        steps = max(1, self.hparams["warmup_steps"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class LoRALinear(nn.Linear):
    """A frozen linear layer and a trained change of low rank (Hu et al. 2021): W x + 2 up(down(x)).

    Its weight keeps its name, so that a folder of pretrained weights fits.
    """

    def __init__(self, like: nn.Linear, rank: int) -> None:
        super().__init__(like.in_features, like.out_features, like.bias is not None, device="meta")
        self.weight, self.bias = like.weight, like.bias
        self.down = nn.Linear(like.in_features, rank, bias=False, device=like.weight.device)
        self.up = nn.Linear(rank, like.out_features, bias=False, device=like.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        out: Tensor = super().forward(x) + 2.0 * self.up(self.down(x))
        return out


def add_lora(model: LlamaForCausalLM, rank: int) -> None:
    """Freeze the model, and let changes of the attention's projections be trained."""
    model.requires_grad_(False)
    for block in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(block.self_attn, name, LoRALinear(getattr(block.self_attn, name), rank))
