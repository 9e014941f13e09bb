"""Defines the module and the data that most features are tried on: blocks, losses and metrics that are logged."""

from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from tests.harness.models import CLASSES, MLP, WIDTH, Batch

NUM_SAMPLES = {"fit": 24, "validate": 16, "test": 16, "predict": 16}
BATCH_SIZE = 8
"""of all data ranks together"""


class Net(MLP):
    """SGD with momentum, whose steps are in proportion to the gradients, and so are errors of rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch["x"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def _evaluate(self, name: str, batch: Batch) -> None:
        logits = self(batch["x"])
        self.accuracy(logits, batch["y"])
        self.log(f"{name}_loss", functional.cross_entropy(logits, batch["y"]), sync_dist=True)
        self.log(f"{name}_accuracy", self.accuracy)


class Samples(Dataset[Batch]):
    """`size` samples; the same for the same seed."""

    def __init__(self, size: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, WIDTH, generator=random)
        self.y = torch.randint(CLASSES, (size,), generator=random)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.x[index], "y": self.y[index]}


class Data(LightningDataModule):
    """Loaders whose data ranks together see in each step what one process sees.

    Args:
        data_rank: this process's place on the data axis.
        data_size: the number of data ranks.
    """

    sampled_by_lightning = False
    """whether the Trainer inserts its own samplers"""

    def __init__(self, data_rank: int = 0, data_size: int = 1) -> None:
        super().__init__()
        self.batch_size = BATCH_SIZE // data_size
        self.data_rank, self.data_size = data_rank, data_size

    def train_dataloader(self) -> Any:
        return self.loader(NUM_SAMPLES["fit"], seed=0)

    def val_dataloader(self) -> Any:
        return self.loader(NUM_SAMPLES["validate"], seed=1)

    def test_dataloader(self) -> Any:
        return self.loader(NUM_SAMPLES["test"], seed=2)

    def predict_dataloader(self) -> Any:
        return self.loader(NUM_SAMPLES["predict"], seed=3)

    def loader(self, size: int, seed: int) -> DataLoader[Batch]:
        """A loader of `size` samples."""
        return self.loader_of(Samples(size, seed))

    def loader_of(self, samples: Dataset[Batch], **options: Any) -> DataLoader[Batch]:
        """A loader of this data rank's samples: every `data_size`-th."""
        if self.data_size > 1 and not self.sampled_by_lightning and not isinstance(samples, IterableDataset):
            sampler = DistributedSampler(samples, self.data_size, self.data_rank, shuffle=False)
            options = {"sampler": sampler} | options
        return DataLoader(samples, **{"batch_size": self.batch_size} | options)


class Sampled(Data):
    """Loaders into which the Trainer inserts samplers for data ranks."""

    sampled_by_lightning = True
