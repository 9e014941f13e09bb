"""Models that users really write, each with a habit that a pipeline could trip over."""

from copy import copy
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.harness import models
from tests.harness.models import MLP, NUM_BLOCKS, WIDTH, Batch, Block


def stacked(model: MLP, block: type[nn.Module]) -> None:
    model.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))


def activation_checkpointed(name: str, reentrant: bool) -> LightningModule:
    """transformers' own."""
    module = getattr(models, name)()
    old = "gradient_checkpointing_enable"
    enable = getattr(module.model, "activation_checkpointing_enable", None) or getattr(module.model, old)
    enable({"use_reentrant": reentrant})
    return module


class CheckpointedInside(MLP):
    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)

    def __init__(self) -> None:
        super().__init__()
        stacked(self, self.Block)


class CheckpointedOutside(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class FrozenBelow(MLP):
    """No gradient reaches stages 0 to 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks[:5].requires_grad_(False)


class FrozenAbove(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3:].requires_grad_(False)


class ReadsGradients(MLP):
    """Its step looks, before and after the stack, at gradients of the rank that it runs on: those of the last step."""

    def loss(self, batch: Batch) -> Tensor:
        before = self._gradients(self.embedding)
        loss = super().loss(batch)
        return (1 + before + 2 * self._gradients(self.head)) * loss

    @staticmethod
    def _gradients(layer: nn.Linear) -> float:
        return 0.0 if layer.weight.grad is None else float(layer.weight.grad.square().sum())


class Auxiliary(MLP):
    """Blocks hand on (state, auxiliary loss)."""

    class Block(Block):
        def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, auxiliary = state
            return super().forward(x), auxiliary + x.square().mean()

    def __init__(self) -> None:
        super().__init__()
        stacked(self, self.Block)

    def loss(self, batch: Batch) -> Tensor:
        x = self.embedding(batch["x"])
        state = (x, x.new_zeros(()))
        for block in self.blocks:
            state = block(state)
        return functional.cross_entropy(self.head(state[0]), batch["y"]) + 0.01 * state[1]


class Dictionaries(MLP):
    """Blocks hand on dictionaries, with a count in them."""

    class Block(Block):
        def forward(self, x: Tensor, trail: Tensor, count: int) -> dict[str, Any]:
            return {"x": super().forward(x), "trail": trail + x.mean(-1), "count": count + 1}

    def __init__(self) -> None:
        super().__init__()
        stacked(self, self.Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        state = {"x": x, "trail": x.new_zeros(len(x)), "count": 0}
        for block in self.blocks:
            state = block(**state)
        return self.head(state["x"]) + state["trail"][:, None] / state["count"]


class InPlace(MLP):
    """Blocks begin in place on what they get, beside a mask that they need again in the backward."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            masked = mask * (x * 2)
            return super().forward(masked + self.act(x.add_(1.0)))

    def __init__(self) -> None:
        super().__init__()
        stacked(self, self.Block)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > -1).to(x.dtype)
        x = self.embedding(x).mul_(2)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.mul_(2))


class LearnedSideInput(MLP):
    """A bias computed once from a parameter, and a parameter itself, go to all blocks."""

    class Block(Block):
        def forward(self, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().forward(x) * scale + bias

    def __init__(self) -> None:
        super().__init__()
        stacked(self, self.Block)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.relative = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.relative.sum(0).tanh()
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.scale, bias=bias)
        return self.head(x)


class Sequence(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))


class Unused(MLP):
    """One parameter is never used, one only where a batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(models.CLASSES))

    def loss(self, batch: Batch) -> Tensor:
        logits = self(batch["x"])
        return functional.cross_entropy(logits + self.sometimes if batch["x"][0, 0] > 0 else logits, batch["y"])


class ReturnsMore(MLP):
    """A dictionary with more than the loss; no batch_idx."""

    def training_step(self, batch: Batch) -> dict[str, Any]:  # type: ignore[override]
        logits = self(batch["x"])
        return {"loss": functional.cross_entropy(logits, batch["y"]), "logits": logits, "text": "more"}


class LossOfOneElement(MLP):
    """Its loss has the shape [1], as that of one sample does before it is averaged."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch).reshape(1)


class LossOfOneElementInADictionary(LossOfOneElement):
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        return {"loss": super().training_step(batch, batch_idx), "samples": batch["y"]}


class Predicts(MLP):
    """Returns what it predicts in a mapping of the batch's type."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        made = copy(batch)
        made["x"] = self(batch["x"])
        return made


class HiddenStates(models.HuggingFace):
    """Asks for all hidden states, and looks at none."""

    def loss(self, batch: Batch) -> Tensor:
        return self.model(**batch, output_hidden_states=True).loss


def hidden_states() -> LightningModule:
    return HiddenStates(models.llama().model)


def ran_before() -> LightningModule:
    """A model that somebody looked into before."""
    module = models.gpt2()
    module.model(input_ids=torch.ones(1, 4, dtype=torch.long), output_hidden_states=True)
    return module


class Noisy(MLP):
    """Dropout and BatchNorm inside the blocks: nothing to compare, but it trains."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(self.batch_norm(super().forward(x)), 0.2, self.training)

    def __init__(self) -> None:
        super().__init__()
        stacked(self, self.Block)


class Optimized(MLP):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.kind)(self.parameters(), **self.options)  # type: ignore[no-any-return]
