"""Habits: user code that computes with parameters, of which a rank may hold a part or nothing."""

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tests.habits.habit import EXACT, Habit, HabitOutcome, Refused, everywhere, in_cubes, on
from tests.harness import models
from tests.harness.checkpoints import read

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)

MISSING = Refused("is on pipeline rank")
PART = Refused("of which this rank holds a part")
ANY_RANK = Refused(
    "is on pipeline rank|of which this rank holds a part",
    "is on pipeline rank ..., or: of which this rank holds a part",
)
"""whichever rank is first"""
REFUSED_IN_STEPS = on(pipelines=MISSING, cubes=PART)
IN_STEP = Refused("is a parameter that the training step changes in place")
PER_PARAMETER: dict[str, HabitOutcome] = on(pipelines=EXACT, cubes=PART)
"""each owner does its own parameters; a part is too little for a norm"""


def on_rank_1(alone: HabitOutcome) -> dict[str, HabitOutcome]:
    """Refused where a parameter is on pipeline rank 1, and with this outcome where all are on one."""
    return everywhere(MISSING) | {"cube": alone}


def full(module: LightningModule, parameter: Tensor) -> Tensor:
    """`full_parameter`, if the Trainer runs on HanayoStrategy."""
    whole: Callable[[Tensor], Tensor] = getattr(module.trainer.strategy, "full_parameter", lambda one: one)
    return whole(parameter)


class Penalised(models.MLP):
    """Weight decay written into the loss."""

    def loss(self, batch: models.Batch) -> Tensor:
        return super().loss(batch) + 0.01 * sum(one.square().sum() for one in self.penalised())

    def penalised(self) -> Iterator[Tensor]:
        return self.parameters()


class PenalisedWhole(Penalised):
    def on_train_batch_start(self, batch: models.Batch, batch_idx: int) -> None:
        self.whole = [full(self, parameter) for parameter in self.parameters()]

    def penalised(self) -> Any:
        return self.whole


class PenalisedHead(Penalised):
    def penalised(self) -> Iterator[Tensor]:
        return self.head.parameters()


class PenalisedFirstBlock(Penalised):
    def penalised(self) -> Iterator[Tensor]:
        return (full(self, parameter) for parameter in self.blocks[0].parameters())


class PenalisedMean(models.MLP):
    def loss(self, batch: models.Batch) -> Tensor:
        count = sum(parameter.numel() for parameter in self.parameters())
        return super().loss(batch) + self.head.weight.abs().sum() / count


class TiedByHand(models.MLP):
    """The head reads a block's weight."""

    def forward(self, x: Tensor) -> Tensor:
        tied = self.blocks[2].up.weight[: models.CLASSES]
        return super().forward(x) + nn.functional.linear(x, tied)


class TiedToWhole(models.MLP):
    def on_train_batch_start(self, batch: models.Batch, batch_idx: int) -> None:
        self.tied = [full(self, self.blocks[2].up.weight)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.tied[0][: models.CLASSES])


class OnSphere(models.MLP):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.div_(parameter.norm() + 1.0)


class OnSphereWhole(models.MLP):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.div_(float(full(self, parameter).norm()) + 1.0)


class RowsNormalised(models.MLP):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for block in self.blocks:
            block.up.weight.copy_(nn.functional.normalize(block.up.weight, dim=1))


class Clamped(models.MLP):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class Centralised(models.MLP):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))


class Noisy(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(3)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                noise = torch.randn(parameter.shape, generator=self.random, dtype=parameter.dtype)
                parameter.grad.add_(noise, alpha=1e-3)


class FreezesAtRandom(models.MLP):
    """Other ranks than the first read no batches: the loader draws on that one alone."""

    def on_train_batch_start(self, *_: Any) -> None:
        frozen = int(torch.randint(len(self.blocks), ()))
        for index, block in enumerate(self.blocks):
            block.requires_grad_(index != frozen)


class Reinitialised(models.MLP):
    def on_train_start(self) -> None:
        for block in self.blocks:
            block.up.reset_parameters()


class Decayed(models.MLP):
    """Weight decay by hand, on the gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter, alpha=0.1)


class NormLogged(models.MLP):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("weight_norm", sum(self.norm(parameter) for parameter in self.blocks.parameters()))

    def norm(self, parameter: Tensor) -> Tensor:
        return parameter.detach().norm()


class HeadNormLogged(models.MLP):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("weight_norm", self.head.weight.detach().norm())


class WholeNormLogged(NormLogged):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen[f"norm {self.global_step}"] = float(sum(self.norm(one) for one in self.blocks.parameters()))

    def norm(self, parameter: Tensor) -> Tensor:
        return full(self, parameter).detach().norm()


class Saved(models.MLP):
    def on_train_batch_end(self, *_: Any) -> None:
        torch.save(self.state_dict(), io.BytesIO())


class Normalised(models.MLP):
    """BatchNorm before the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Queue(models.MLP):
    """A queue of old inputs, as in contrastive learning; the loss pushes the output away from their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, models.WIDTH))

    def loss(self, batch: models.Batch) -> Tensor:
        loss = super().loss(batch) + 0.1 * (self.embedding(batch["x"]) @ self.queue.mean(0)).mean()
        self.queue = torch.cat([batch["x"], self.queue])[:16]
        return loss


class NormalisedInStep(models.MLP):
    """Prototypes whose rows are normalised before each use, as in SwAV."""

    def loss(self, batch: models.Batch) -> Tensor:
        with torch.no_grad():
            self.head.weight.data.copy_(nn.functional.normalize(self.head.weight.data, dim=1))
        return super().loss(batch)


class StepsCounted(models.MLP):
    """A counter that is advanced after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def loss(self, batch: models.Batch) -> Tensor:
        return super().loss(batch) / (1 + self.count)

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1


class Checkpointed(models.MLP):
    """Saves a checkpoint in a hook, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "last.ckpt"
            self.trainer.save_checkpoint(path)
            if self.trainer.is_global_zero:
                self.seen |= read(path)["state_dict"]


class CountedInStep(models.MLP):
    """A counter that the step advances, and that a hook reads on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def loss(self, batch: models.Batch) -> Tensor:
        self.count += 1
        return super().loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(1.0 - 0.001 * int(self.count))


class AverageByHand(Callback):
    """An exponential moving average of the weights, which the module gets at the end."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            self.average = copy.deepcopy(pl_module)
        for mean, parameter in zip(self.average.parameters(), pl_module.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for mean, parameter in zip(self.average.parameters(), pl_module.parameters(), strict=True):
            parameter.copy_(mean)


def averaged() -> dict[str, Any]:
    return {"callbacks": [AverageByHand()]}


EVEN = partial(models.vectors, (8, 8, 8), torch.float64)


def _habit(
    name: str,
    model: Callable[[], LightningModule],
    outcomes: dict[str, HabitOutcome],
    batches: Callable[[], list[models.Batch]] = VECTORS,
    **options: Any,
) -> Habit:
    return Habit(name, model, batches, outcomes, **options)


HABITS = [
    _habit("an L2 penalty over `self.parameters()` in the loss", Penalised, REFUSED_IN_STEPS),
    _habit(
        "the same with `full_parameter` in `on_train_batch_start`", PenalisedWhole, everywhere(EXACT), always_exact=True
    ),
    _habit("a penalty on the head", PenalisedHead, everywhere(EXACT)),
    _habit(
        "a penalty on the first block, with `full_parameter` in the step",
        PenalisedFirstBlock,
        everywhere(EXACT),
        always_exact=True,
    ),
    _habit("a penalty divided by the number of all parameters", PenalisedMean, everywhere(EXACT)),
    _habit("a block's weight used by the head, tied by hand", TiedByHand, on_rank_1(PART)),
    _habit("the same with `full_parameter`, tied by hand", TiedToWhole, everywhere(EXACT), always_exact=True),
    _habit("weights kept on a sphere: `p.data.div_(p.norm())` in a hook", OnSphere, PER_PARAMETER),
    _habit("the same with `full_parameter(p).norm()`", OnSphereWhole, everywhere(EXACT), always_exact=True),
    _habit("rows of weights normalised in a hook", RowsNormalised, PER_PARAMETER),
    _habit("weights clamped after `optimizer.step`", Clamped, everywhere(EXACT)),
    _habit("gradients centralised in `on_before_optimizer_step`", Centralised, PER_PARAMETER),
    _habit("noise added to gradients", Noisy, PER_PARAMETER),
    _habit("a random block frozen in `on_train_batch_start`", FreezesAtRandom, everywhere(EXACT), always_exact=True),
    _habit("`reset_parameters()` of layers in `on_train_start`", Reinitialised, PER_PARAMETER),
    _habit("weight decay by hand: `p.grad.add_(p, alpha=0.1)`", Decayed, everywhere(EXACT)),
    _habit("the norm of all weights logged in a hook", NormLogged, on(pipelines=MISSING, cubes=PART)),
    _habit("the norm of the head's weight logged in a hook", HeadNormLogged, PER_PARAMETER),
    _habit("the norm of all weights read with `full_parameter`", WholeNormLogged, everywhere(EXACT), always_exact=True),
    _habit("`torch.save(self.state_dict())` in a hook", Saved, everywhere(ANY_RANK)),
    _habit("`trainer.save_checkpoint()` in a hook", Checkpointed, everywhere(EXACT)),
    _habit("prototypes normalised in the step", NormalisedInStep, in_cubes(IN_STEP)),
    _habit("BatchNorm outside the stack", Normalised, everywhere(EXACT), EVEN),
    _habit("a queue of old samples in a buffer", Queue, everywhere(EXACT)),
    _habit("a counter in a buffer, advanced in a hook", StepsCounted, everywhere(EXACT)),
    _habit("a counter in a buffer, advanced in the step, read in a hook", CountedInStep, everywhere(EXACT)),
    _habit("an average of weights by hand in a callback", models.MLP, everywhere(EXACT), trainer=averaged),
]
