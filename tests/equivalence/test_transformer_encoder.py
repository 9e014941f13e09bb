"""`nn.TransformerEncoder` with a padding mask trains and validates as in one process, which may use nested tensors."""

import warnings
from functools import partial

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn

from tests.harness.models import Batch
from tests.harness.pool import Pool
from tests.harness.training import Layout, make_loader, make_trainer

WIDTH = 16


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(13, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(WIDTH, 3)

    def loss(self, batch: Batch) -> Tensor:
        padding = batch["tokens"] == 0
        hidden = self.encoder(self.embedding(batch["tokens"]), src_key_padding_mask=padding)
        return nn.functional.cross_entropy(self.head(hidden[:, 0]), batch["label"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def padded(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 13, (count, 8, 6), generator=generator)
    tokens[:, 4:, 4:] = 0  # in the later micro-batches only
    return [{"tokens": batch, "label": batch[:, 0] % 3} for batch in tokens]


def losses(layout: Layout) -> tuple[float, float]:
    warnings.filterwarnings("ignore", message=".*nested tensors is in prototype")  # used by the single process
    torch.manual_seed(0)
    module = Classifier().double()
    trainer: Trainer = make_trainer(layout, max_steps=3, num_sanity_val_steps=0, val_check_interval=3)
    trainer.fit(module, make_loader(padded(3)), make_loader(padded(2)))
    return float(trainer.callback_metrics["train_loss"]), float(trainer.callback_metrics["val_loss"])


def test_padding_mask_reaches_the_blocks_of_every_rank(pool: Pool) -> None:
    (alone,) = pool.run(1, partial(losses, Layout()))
    for view in pool.run(2, partial(losses, Layout(2, 1, 1))):
        torch.testing.assert_close(torch.tensor(view), torch.tensor(alone), rtol=1e-6, atol=0)
