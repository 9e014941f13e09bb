"""Features: the loaders and data sets that a Trainer takes."""

from collections.abc import Iterator
from typing import Any

from lightning import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from tests.features.feature import AsDDP, Equal, Feature, on
from tests.features.net import NUM_SAMPLES, Data, Net, Sampled, Samples
from tests.features.trial import Trial, fit, predict
from tests.harness.models import Batch


class TwoOfEach(Data):
    """Two loaders wherever a Trainer evaluates."""

    def val_dataloader(self) -> Any:
        return [self.loader(16, seed=1), self.loader(8, seed=4)]

    test_dataloader = predict_dataloader = val_dataloader


class TakesSeveral(Net):
    """Its step gets the batches of several loaders."""

    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> Tensor:
        loss = sum(self.loss(part) for part in batch.values()) / len(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class AsDictionary(Data):
    def train_dataloader(self) -> Any:
        return {"a": self.loader(24, seed=0), "b": self.loader(16, seed=5)}


class Longest(AsDictionary):
    def train_dataloader(self) -> Any:
        return CombinedLoader(super().train_dataloader(), "max_size_cycle")


class Shortest(AsDictionary):
    def train_dataloader(self) -> Any:
        return CombinedLoader(super().train_dataloader(), "min_size")


class Stream(IterableDataset[Batch]):
    """The samples of one data rank, without a length."""

    def __init__(self, data_rank: int, data_size: int) -> None:
        self.samples, self.data_rank, self.data_size = Samples(NUM_SAMPLES["fit"]), data_rank, data_size

    def __iter__(self) -> Iterator[Batch]:
        return (self.samples[index] for index in range(self.data_rank, len(self.samples), self.data_size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.samples) // self.data_size


class Streamed(Data):
    stream: type[Stream] = Stream

    def train_dataloader(self) -> Any:
        return self.loader_of(self.stream(self.data_rank, self.data_size))


class StreamedWithLength(Streamed):
    stream = SizedStream


class Shuffled(Sampled):
    def train_dataloader(self) -> Any:
        return self.loader_of(Samples(NUM_SAMPLES["fit"]), shuffle=True)


class Backwards(BatchSampler):
    """The samples of each batch in reverse order."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


class InOwnBatches(Data):
    def train_dataloader(self) -> Any:
        samples = Samples(NUM_SAMPLES["fit"])
        own = range(self.data_rank, len(samples), self.data_size)
        return DataLoader(samples, batch_sampler=Backwards(own, self.batch_size, drop_last=True))


class Uneven(Data):
    def train_dataloader(self) -> Any:
        return self.loader(20, seed=0)


class Reloaded(Data):
    """Other samples in each epoch."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return self.loader(NUM_SAMPLES["fit"], seed=self.trainer.current_epoch)


class WithWorkers(Data):
    def train_dataloader(self) -> Any:
        return self.loader_of(Samples(NUM_SAMPLES["fit"]), num_workers=1, persistent_workers=True)


class HasLoader(Net):
    """Its own loader, without a DataModule and without validation."""

    def train_dataloader(self) -> Any:
        strategy = self.trainer.strategy  # of one process, of DDP, or HanayoStrategy
        size = getattr(strategy, "data_parallel_size", self.trainer.world_size)
        return Data(getattr(strategy, "data_rank", self.trainer.global_rank), size).train_dataloader()


def fit_without_data(trial: Trial) -> None:
    trial.trainer.fit(trial.module)


def evaluate_everything(trial: Trial) -> None:
    fit(trial)
    trial.record(results=trial.trainer.test(trial.module, datamodule=trial.data, verbose=False))
    for index, predictions in enumerate(trial.trainer.predict(trial.module, datamodule=trial.data) or []):
        trial.record_samples(f"loader {index}", *predictions)


def shuffle(trial: Trial) -> None:
    seed_everything(3, workers=True, verbose=False)
    fit(trial)


FEATURES = [
    Feature("several loaders for validation, test and prediction", data=TwoOfEach, script=evaluate_everything),
    Feature("`CombinedLoader` (`max_size_cycle`)", module=TakesSeveral, data=Longest),
    Feature("`CombinedLoader` (`min_size`)", module=TakesSeveral, data=Shortest),
    Feature("a dictionary of training loaders", module=TakesSeveral, data=AsDictionary),
    Feature("an iterable dataset without a length", data=Streamed, note="each data rank makes its own samples"),
    Feature("an iterable dataset with a length", data=StreamedWithLength),
    Feature(
        "`shuffle=True`",
        data=Shuffled,
        script=shuffle,
        outcomes=on(Equal(), AsDDP()),
        note="data ranks shuffle by Lightning's sampler",
    ),
    Feature(
        "`use_distributed_sampler=True`, the default",
        data=Sampled,
        outcomes=on(Equal(), AsDDP()),
        note="Lightning's sampler for data ranks shuffles",
    ),
    Feature("`predict` with the samplers that Lightning inserts", data=Sampled, script=predict),
    Feature("a custom batch sampler", data=InOwnBatches),
    Feature("a smaller last batch", data=Uneven),
    Feature("workers of loaders", data=WithWorkers),
    Feature("a loader of the module, without validation", module=HasLoader, script=fit_without_data),
    Feature("`reload_dataloaders_every_n_epochs=1`", lambda _: {"reload_dataloaders_every_n_epochs": 1}, data=Reloaded),
]
