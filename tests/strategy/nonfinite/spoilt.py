"""A model of which one value, at a chosen place, becomes NaN or infinite in the third batch."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tests.harness import models

BATCH, CALL = 2, 1
"""the batch that is spoilt, and which micro-batch of it, both from 0"""


@dataclass(frozen=True)
class Fault:
    """Where the value is made, and on which data rank."""

    where: Literal["batch", "forward", "backward", "weight", "loss", "nowhere"]
    block: int = 0
    data_rank: int = 0
    value: float = float("nan")


class _Spoiling:
    """What is to be spoilt in this process: not in the module, whose attributes a pipeline looks after."""

    fault = Fault("nowhere")
    calls: dict[str, int] = {}

    @classmethod
    def now(cls, where: str, block: int = 0) -> bool:
        """Whether this call is the one."""
        key = f"{where} {block}"
        cls.calls[key] = call = cls.calls.get(key, -1) + 1
        return call == CALL and (cls.fault.where, cls.fault.block) == (where, block)


class _Gradients(torch.autograd.Function):
    """Passes `x` on. The gradient of `x`, or that of `bias` alone, isn't finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, where: str, value: float) -> Tensor:
        ctx.shape, ctx.where, ctx.value = bias.shape, where, value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        of_x = gradient + ctx.value if ctx.where == "backward" else gradient
        of_bias = gradient.new_full(ctx.shape, ctx.value if ctx.where == "weight" else 0.0)
        return of_x, of_bias, None, None


class Block(models.Block):
    """A block that knows its number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        value = _Spoiling.fault.value
        if _Spoiling.now("forward", self.index):
            out = out + value
        for where in ("backward", "weight"):
            if _Spoiling.now(where, self.index):
                out = _Gradients.apply(out, self.up.bias, where, value)  # type: ignore[no-any-return]
        return out


class Spoilt(models.MLP):
    """Trains until its fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.blocks = torch.nn.ModuleList(Block(i) for i in range(models.NUM_BLOCKS))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        rank = getattr(self.trainer.strategy, "data_rank", 0)
        is_due = batch_idx == BATCH and rank == self.fault.data_rank
        _Spoiling.fault, _Spoiling.calls = self.fault if is_due else Fault("nowhere"), {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if _Spoiling.now("batch"):
            batch = {**batch, "x": batch["x"] + self.fault.value}
        loss = super().training_step(batch, batch_idx)
        return loss * self.fault.value if _Spoiling.now("loss") else loss
