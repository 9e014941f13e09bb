"""Habits: what blocks store, record and log besides their output, and code that reads it in the step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.habit import EXACT, FP32_NORMS, Habit, Refused, everywhere, on
from tests.harness import models
from tests.harness.models import MLP, NUM_BLOCKS, VOCABULARY, WIDTH, Batch, Block

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)
TEXTS = partial(models.windows, (8, 8, 8))


class Stack(MLP):
    """Eight blocks of the class `Block`."""

    Block: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(NUM_BLOCKS))
        self.seen: dict[str, Any] = {}

    def see(self, name: str, value: Any) -> None:
        self.seen[f"{name} {len(self.seen)}"] = float(value)


class AuxiliaryLoss(Stack):
    """A mean over samples, initialised nowhere, with a gradient."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.aux_loss = self.up(x).square().mean()
            return super().forward(x)

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 0.1 * sum(block.aux_loss for block in self.blocks)


class InnerStatistics(Stack):
    """A detached statistic, stored by a module inside the block on a list that the constructor made."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm.means = []

        def forward(self, x: Tensor) -> Tensor:
            self.norm.means = [x.detach().mean()]
            return super().forward(x)

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        return loss * (1 + sum(block.norm.means[0] for block in self.blocks) ** 2 * 0)


class CollectsInBox(Stack):
    """Blocks append losses to a list that all of them share; the step clears and sums it."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.losses.append(self.down(torch.relu(self.up(x))).abs().mean())
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        for block in self.blocks:
            block.losses = self.losses

    def loss(self, batch: Batch) -> Tensor:
        self.losses.clear()
        loss = super().loss(batch)
        assert len(self.losses) == NUM_BLOCKS
        return loss + 0.1 * sum(self.losses)


class LateBlocksAddToBox(CollectsInBox):
    """Only the last blocks, as in models whose first layers are dense, add a loss to what the step resets to zero."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            if self.index >= 5:
                self.owner[0].aux_loss = self.owner[0].aux_loss + self.up(x).square().mean()
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.aux_loss: Any = 0.0
        for index, block in enumerate(self.blocks):
            block.owner, block.index = [self], index

    def loss(self, batch: Batch) -> Tensor:
        self.aux_loss = 0.0
        return Stack.loss(self, batch) + 0.1 * self.aux_loss


class LogsInside(Stack):
    """Blocks call the LightningModule's log."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.owner[0].log("activation", x.mean(), on_step=True)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.owner = [self]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            self.see("activation", self.trainer.callback_metrics["activation"])


class Counts(Stack):
    """Each block counts its calls, and uses the count."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)


class ReadsBuffer(Stack):
    """Each block keeps a running mean in a buffer, in place, and the step reads it."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.running.mul_(0.9).add_(0.1 * x.detach().mean())
            return super().forward(x)

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        return loss * (1 + 0 * sum(float(block.running) for block in self.blocks))


class FeatureHook(Stack):
    """A forward hook keeps features of an inner module for a loss."""

    Block = Block

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            block.up.register_forward_hook(partial(self.keep, index))

    def keep(self, index: int, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features[index] = output

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 0.1 * sum(f.square().mean() for f in self.features.values())


class LocalHook(Stack):
    """A forward hook that only scales the output of its own module, and says so."""

    Block = Block

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.register_forward_hook(halve)


def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.5


halve.is_local = True  # type: ignore[attr-defined]


class Transformers(models.Trained):
    """A model of transformers with a loss in fp64: its own is computed in fp32."""

    def __init__(self, model: nn.Module, extra: Callable[[Any], Tensor], **asked: bool) -> None:
        super().__init__()
        self.model = model
        self.extra = extra
        self.asked = asked

    def loss(self, batch: Batch) -> Tensor:
        output = self.model(input_ids=batch["input_ids"], **self.asked)
        loss = functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
        return loss + 0.1 * self.extra(output)


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def mixtral() -> LightningModule:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True, experts_implementation="eager")
    return Transformers(MixtralForCausalLM(config), auxiliary_loss)


def auxiliary_loss(output: Any) -> Tensor:
    return output.aux_loss


def gpt2(key: str) -> LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=NUM_BLOCKS, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    return Transformers(GPT2LMHeadModel(config), partial(mean_squares, key), **{f"output_{key}": True})


def mean_squares(key: str, output: Any) -> Tensor:
    recorded = output[key]
    assert len(recorded) == NUM_BLOCKS + (key == "hidden_states")
    return sum(one.square().mean() for one in recorded)  # type: ignore[return-value]


HABITS = [
    Habit("a block stores `self.aux_loss`, and the step adds it", AuxiliaryLoss, VECTORS, everywhere(EXACT), True),
    Habit("a module in a block stores a statistic", InnerStatistics, VECTORS, everywhere(EXACT), True),
    Habit("blocks append losses to a list that they share", CollectsInBox, VECTORS, everywhere(EXACT), True),
    Habit("only the last blocks add to a loss that the step resets", LateBlocksAddToBox, VECTORS, everywhere(EXACT)),
    Habit("blocks call `self.log` of the LightningModule", LogsInside, VECTORS, everywhere(EXACT), True),
    Habit(
        "the step reads a buffer that each block changes in place",
        ReadsBuffer,
        VECTORS,
        {
            "pipeline": Refused("a block that is on another pipeline rank"),
            "waves": Refused("a block that is on another pipeline rank"),
            "cube": Refused("each rank of the cube"),
            "both": Refused("a block that is on another pipeline rank|each rank of the cube"),
        },
    ),
    Habit("a forward hook inside blocks keeps features", FeatureHook, VECTORS, everywhere(Refused("has the hook"))),
    Habit("a hook that declares `is_local`", LocalHook, VECTORS, on(pipelines=EXACT, cubes=EXACT)),
    Habit("Mixtral with `output_router_logits=True`", mixtral, TEXTS,
          everywhere(EXACT),
          tolerance=FP32_NORMS),
    Habit("`output_attentions=True`", partial(gpt2, "attentions"), TEXTS,
          on(pipelines=EXACT, cubes=Refused("asks for what the blocks compute inside"))),
    Habit("`output_hidden_states=True`", partial(gpt2, "hidden_states"), TEXTS,
          on(pipelines=EXACT, cubes=Refused("asks for what the blocks compute inside"))),
]  # fmt: skip
