"""Habits: attributes that the step sets, and blocks or later code read."""

import threading
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.habit import EXACT, Habit, Refused, everywhere
from tests.habits.side_outputs import Stack
from tests.harness import models
from tests.harness.models import WIDTH, Batch, Block

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)


class Tempered(Block):
    """Multiplies its input with `temperature`."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature: Any = 1.0
        self.register_buffer("sigma", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.temperature * self.sigma)


class Annealed(Stack):
    """The step sets a number on each block, another one in each step."""

    Block = Tempered

    def loss(self, batch: Batch) -> Tensor:
        for block in self.blocks:
            block.temperature = 1.0 / (1.0 + self.global_step)
        return super().loss(batch)


class AnnealedInHook(Annealed):
    """The same in a hook that runs on all ranks, with a buffer."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for block in self.blocks:
            block.sigma.fill_(0.5 + batch_idx)

    def loss(self, batch: Batch) -> Tensor:
        return Stack.loss(self, batch)


class FillsBuffer(Stack):
    """The step changes a buffer of each block in place."""

    Block = Tempered

    def loss(self, batch: Batch) -> Tensor:
        for block in self.blocks:
            block.sigma.fill_(0.5)
        return super().loss(batch)


class AssignsBuffer(Stack):
    """The step assigns a buffer of each block."""

    Block = Tempered

    def loss(self, batch: Batch) -> Tensor:
        for block in self.blocks:
            block.sigma = torch.full((), 0.5 + self.global_step, dtype=torch.float64)
        return super().loss(batch)


@dataclass
class Box:
    condition: Tensor | None = None
    level: float = 0.0


class Conditioned(Stack):
    """A box that all blocks share carries a tensor for each sample, with a gradient, and a number."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.box.condition * self.box.level)

    def __init__(self) -> None:
        super().__init__()
        self.box = Box()
        self.condition = nn.Linear(WIDTH, WIDTH)
        for block in self.blocks:
            block.box = self.box

    def loss(self, batch: Batch) -> Tensor:
        self.box.condition = self.condition(batch["x"])
        self.box.level = 0.1 * (1 + self.global_step)
        return super().loss(batch)


class Leveled(Stack):
    """A box with a number alone."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * (1 - self.box.level))

    def __init__(self) -> None:
        super().__init__()
        self.box = Box()
        for block in self.blocks:
            block.box = self.box

    def loss(self, batch: Batch) -> Tensor:
        self.box.level = 0.1 * (1 + self.global_step)
        return super().loss(batch)


class ReadsOwner(Stack):
    """Blocks read an attribute of the LightningModule, which the step sets."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.owner[0].level)

    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0
        for block in self.blocks:
            block.owner = [self]

    def loss(self, batch: Batch) -> Tensor:
        self.level = 1.0 / (1 + self.global_step)
        return super().loss(batch)


class SwitchesMode(Stack):
    """Dropout is off while the blocks run, and on again after them."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.dropout(x))

    def loss(self, batch: Batch) -> Tensor:
        self.eval()
        loss = super().loss(batch)
        self.train()
        return loss


class KeepsTargets(Stack):
    """An attribute is set before the blocks and read after them."""

    Block = Block

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.abs().amax(1, keepdim=True)
        return super().forward(x) * self.scale


class CountsTwice(Stack):
    """A counter is advanced before and after the blocks."""

    Block = Block

    def __init__(self) -> None:
        super().__init__()
        self.phase = 0

    def loss(self, batch: Batch) -> Tensor:
        self.phase += 1
        loss = super().loss(batch)
        self.phase += 1
        return loss


class SetsFunction(Stack):
    """The step gives each block a function."""

    class Block(Block):
        activation: Any = staticmethod(torch.relu)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.activation(x))

    def loss(self, batch: Batch) -> Tensor:
        for block in self.blocks:
            block.activation = torch.tanh
        return super().loss(batch)


FACTOR: ContextVar[float] = ContextVar("factor", default=1.0)


class Contextual(models.MLP):
    """Hooks set a context variable for the step, and the step for hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        FACTOR.set(1 / (1 + batch_idx))

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch) * FACTOR.get()
        FACTOR.set(2.0)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen[f"batch {batch_idx}"] = FACTOR.get()


class ReadsContext(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * FACTOR.get())


class ContextualBlocks(Stack):
    """The step sets a context variable, and blocks read it."""

    Block = ReadsContext

    def loss(self, batch: Batch) -> Tensor:
        token = FACTOR.set(0.5)
        loss = super().loss(batch)
        FACTOR.reset(token)
        return loss


class ThreadLocal(models.MLP):
    """The step reads from a `threading.local` that a hook has filled."""

    def on_fit_start(self) -> None:
        self.local = threading.local()
        self.local.factor = 0.5

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) * self.local.factor


HABITS = [
    Habit("the step sets a number on each block (a temperature)", Annealed, VECTORS, everywhere(EXACT)),
    Habit("`on_train_batch_start` sets it, or fills a buffer", AnnealedInHook, VECTORS, everywhere(EXACT)),
    Habit("the step assigns a buffer of each block", AssignsBuffer, VECTORS,
          everywhere(EXACT)),
    Habit("the step fills a buffer of each block in place", FillsBuffer, VECTORS,
          everywhere(Refused("on_train_batch_start"))),
    Habit("the step sets a number in an object that blocks share", Leveled, VECTORS, everywhere(EXACT)),
    Habit("the step puts a tensor with a gradient into it", Conditioned, VECTORS,
          everywhere(EXACT)),
    Habit("blocks read an attribute of the LightningModule", ReadsOwner, VECTORS, everywhere(EXACT)),
    Habit("the step calls `self.eval()` and `self.train()`", SwitchesMode, VECTORS, everywhere(EXACT)),
    Habit("an attribute is set before the blocks, and read after", KeepsTargets, VECTORS, everywhere(EXACT)),
    Habit("a counter advances before the blocks and after", CountsTwice, VECTORS, everywhere(EXACT)),
    Habit("the step sets a function on each block", SetsFunction, VECTORS, everywhere(Refused("can't be sent"))),
    Habit("a context variable (`contextvars`) set in hooks and in the step, and read there", Contextual, VECTORS,
          everywhere(EXACT)),
    Habit("a context variable set in the step, and read in blocks", ContextualBlocks, VECTORS,
          everywhere(Refused("sets the context variable 'factor'"))),
    Habit("a `threading.local` or an object of sqlite3, made in a hook and used in the step", ThreadLocal, VECTORS,
          everywhere(Refused("belongs to another thread"))),
]  # fmt: skip
