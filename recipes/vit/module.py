"""A vision transformer as a LightningModule around the unmodified `ViTForImageClassification` of transformers."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from transformers import ViTConfig, ViTForImageClassification


class ViT(L.LightningModule):
    """An image classifier.

    Args:
        image_size: Pixels along each side of an image.
        patch_size: Pixels along each side of a patch, of which each is a token.
        num_classes: How many labels there are.
        num_layers: How many blocks.
        width: Features per token.
        num_heads: Attention heads per block.
        learning_rate: AdamW's learning rate after the warm-up.
        warmup_steps: Optimizer steps over which the learning rate rises from zero.
    """

    def __init__(
        self,
        image_size: int = 32,
        patch_size: int = 4,
        num_classes: int = 4,
        num_layers: int = 8,
        width: int = 64,
        num_heads: int = 4,
        learning_rate: float = 1e-3,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = ViTForImageClassification(
            ViTConfig(
                image_size=image_size,
                patch_size=patch_size,
                num_labels=num_classes,
                num_hidden_layers=num_layers,
                hidden_size=width,
                intermediate_size=4 * width,
                num_attention_heads=num_heads,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch, 3, size, size]."""
        logits: Tensor = self.net(pixel_values=images).logits
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean cross-entropy."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the loss and the share of right labels, each over the whole validation set."""
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, batch_size=len(labels), sync_dist=True)
        self.log("val_accuracy", self.accuracy, on_step=False, on_epoch=True, batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        """AdamW with a warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"], weight_decay=0.05)
        steps = max(1, self.hparams["warmup_steps"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
