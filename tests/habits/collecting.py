"""Habits: what steps collect for the end of the epoch, and hooks that read outputs and batches."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.habits.habit import EXACT, Habit, Refused, everywhere, in_cubes
from tests.harness import models
from tests.harness.models import CLASSES, Batch
from tests.harness.training import make_loader

SIZES = (8, 8, 6)
VECTORS = partial(models.vectors, SIZES, torch.float64)


class Collects(models.MLP):
    """Lightning's own habit: the mean of the epoch's losses, logged at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.outputs: list[Any] = []

    def see(self, name: str, value: Any) -> None:
        self.seen[f"{name} {len(self.seen)}"] = float(value)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_mean", torch.stack(self.outputs).mean())
        self.see("number", len(self.outputs))
        self.outputs.clear()

    def on_train_end(self) -> None:
        if "epoch_mean" in self.trainer.callback_metrics:
            self.see("epoch_mean", self.trainer.callback_metrics["epoch_mean"])


class Decides(Collects):
    """Collects numbers, and halves all weights if their mean is large."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = models.MLP.training_step(self, batch, batch_idx)
        self.outputs.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        mean = sum(self.outputs) / len(self.outputs)
        self.outputs.clear()
        self.see("mean", mean)
        if mean > 0.1:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.5)


class Averages(Collects):
    """Moving averages of all weights, made in hooks, which replace the weights; and a list of parameters to shrink."""

    def on_train_start(self) -> None:
        self.averages = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        self.matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        for name, parameter in self.named_parameters():
            self.averages[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self.averages[name])
            for matrix in self.matrices:
                matrix.mul_(0.5)


class CollectsPredictions(Collects):
    """Predictions and labels of the epoch, in a dictionary of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: dict[str, list[Tensor]] = {"scores": [], "labels": []}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self(batch["x"])
        self.collected["scores"].append(scores.detach())
        self.collected["labels"].append(batch["y"])
        loss = functional.cross_entropy(scores, batch["y"])
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        scores, labels = (torch.cat(self.collected[name]) for name in ("scores", "labels"))
        self.see("samples", len(labels))
        self.see("accuracy", (scores.argmax(-1) == labels).double().mean())
        self.see("first", scores[0, 0])
        self.see("last", scores[-1, -1])
        for collected in self.collected.values():
            collected.clear()


class Validates(Collects):
    """The same in validation, of which the hook also remembers the best."""

    def __init__(self) -> None:
        super().__init__()
        self.best = 100.0
        self.validation_outputs: list[Any] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return models.MLP.training_step(self, batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self(batch["x"])
        loss = functional.cross_entropy(scores, batch["y"])
        self.validation_outputs.append({"loss": loss, "wrong": scores.argmax(-1) != batch["y"]})
        return loss

    def on_validation_epoch_end(self) -> None:
        mean = torch.stack([output["loss"] for output in self.validation_outputs]).mean()
        self.log("val_loss", mean)
        self.best = min(self.best, float(mean))
        self.see("wrong", torch.cat([output["wrong"] for output in self.validation_outputs]).double().mean())
        self.validation_outputs.clear()

    def val_dataloader(self) -> Any:
        return make_loader(VECTORS())

    def on_train_epoch_end(self) -> None:
        self.see("best", self.best)
        self.see("val_loss", self.trainer.callback_metrics["val_loss"])


class Counts(Collects):
    """Counters of correct predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.correct = 0
        self.number = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self(batch["x"])
        self.correct += int((scores.argmax(-1) == batch["y"]).sum())
        self.number += len(batch["y"])
        loss = functional.cross_entropy(scores, batch["y"])
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.see("accuracy", self.correct / self.number)
        self.correct = self.number = 0


class CollectsCounts(Collects):
    """The same counts in lists."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self(batch["x"])
        self.outputs.append(((scores.argmax(-1) == batch["y"]).sum(), len(batch["y"])))
        loss = functional.cross_entropy(scores, batch["y"])
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.see("accuracy", sum(n for n, _ in self.outputs) / sum(n for _, n in self.outputs))
        self.outputs.clear()


class KeepsLast(Collects):
    """A hook reads the last batch's scores, which the step has stored."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self.scores = self(batch["x"])
        loss = self.last_loss = functional.cross_entropy(scores, batch["y"])
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see("loss", self.last_loss)
        self.see("scores", self.scores.shape[0])
        self.see("mean", self.scores.mean())

    def on_train_epoch_end(self) -> None: ...


class ReadsOutputs(Collects):
    """`on_train_batch_end` reads outputs and batch, and logs them."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        scores = self(batch["x"])
        loss = functional.cross_entropy(scores, batch["y"])
        self.log("train_loss", loss)
        return {"loss": loss, "logits": scores}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.log("logits", outputs["logits"].mean())
            self.log("wrong", (outputs["logits"].argmax(-1) != batch["y"]).double().mean())
        self.see("norm", outputs["logits"].norm())
        self.see("batch", batch["x"].sum())
        self.see("classes", len(outputs["logits"][0]) / CLASSES)

    def on_train_epoch_end(self) -> None: ...

    def on_train_end(self) -> None:
        for name in ("logits", "wrong"):
            self.see(name, self.trainer.callback_metrics[name])


class LargeOutputs(Collects):
    """Outputs that are too large to be sent to other pipeline ranks, logged."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        scores = self(batch["x"])
        loss = functional.cross_entropy(scores, batch["y"])
        self.log("train_loss", loss)
        return {"loss": loss, "logits": scores.repeat(1, 4000)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("confidence", outputs["logits"].softmax(-1).amax(-1).mean())
        if self.trainer.is_global_zero:
            self.see("mean", outputs["logits"].mean())

    def on_train_epoch_end(self) -> None: ...

    def on_train_end(self) -> None:
        self.see("confidence", self.trainer.callback_metrics["confidence"])


class DecidesByLargeOutputs(LargeOutputs):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs["logits"].mean() > 0:
            self.see("positive", batch_idx)

    def on_train_end(self) -> None: ...


class ComputesMetric(Collects):
    """A torchmetrics metric that the step updates."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics.classification import MulticlassAccuracy

        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self(batch["x"])
        self.accuracy.update(scores, batch["y"])
        loss = functional.cross_entropy(scores, batch["y"])
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        accuracy = self.accuracy.compute()
        self.log("accuracy", accuracy)
        self.see("accuracy", accuracy)
        self.accuracy.reset()


class UnknownMeans(Validates):
    """Validation losses that are neither returned nor logged."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        self.validation_outputs.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.validation_outputs).mean())
        self.validation_outputs.clear()

    def on_train_epoch_end(self) -> None: ...


PER_RANK = Refused("each rank of the cube runs it on its own samples")

HABITS = [
    Habit("losses collected in the step, their mean logged in `on_train_epoch_end`", Collects, VECTORS,
          everywhere(EXACT), True),
    Habit("losses as numbers, and a decision by their mean at the epoch's end", Decides, VECTORS,
          everywhere(EXACT), True),
    Habit("predictions and labels collected, for a metric at the epoch's end", CollectsPredictions, VECTORS,
          everywhere(EXACT), True),
    Habit("the same in validation, with the best value kept", Validates, VECTORS, everywhere(EXACT), True),
    Habit("counts collected in a list, summed at the epoch's end", CollectsCounts, VECTORS,
          everywhere(EXACT)),
    Habit("counters that the step advances, read at the epoch's end", Counts, VECTORS,
          in_cubes(PER_RANK)),
    Habit("moving averages of all weights and a list of parameters, kept in `on_train_batch_end`", Averages, VECTORS,
          everywhere(EXACT), True),
    Habit("an attribute that the step sets, read in `on_train_batch_end`", KeepsLast, VECTORS, everywhere(EXACT)),
    Habit("`outputs['logits']` and `batch` in `on_train_batch_end`", ReadsOutputs, VECTORS, everywhere(EXACT), True),
    Habit("large `outputs` in it, logged", LargeOutputs, VECTORS, everywhere(EXACT)),
    Habit("large `outputs` in it, in a condition", DecidesByLargeOutputs, VECTORS,
          everywhere(Refused("logits.*is_global_zero", "outputs['logits'] is on pipeline rank 0 ... is_global_zero"))
          | {"cube": EXACT}),
    Habit("a torchmetrics metric, computed in `on_train_epoch_end`", ComputesMetric, VECTORS, everywhere(EXACT)),
    Habit("validation losses collected, but neither returned nor logged", UnknownMeans, VECTORS,
          everywhere(EXACT)),
]  # fmt: skip
