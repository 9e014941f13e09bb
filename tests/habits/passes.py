"""Habits: several passes through the stack in one step."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.habit import EXACT, Habit, Refused, everywhere, on
from tests.harness import models
from tests.harness.models import NUM_BLOCKS, VOCABULARY, WIDTH, Batch
from tests.harness.training import make_loader

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)
TEXTS = partial(models.windows, (8, 8, 8))

# in training


class Before(models.MLP):
    """Targets come from the model itself, on another view of the samples."""

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = self(batch["x"].flip(1))
        scores = self(batch["x"])
        return functional.cross_entropy(scores, batch["y"]) + (scores - target).square().mean()


class After(models.MLP):
    """The same, with the scores first."""

    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["x"])
        with torch.no_grad():
            target = self(batch["x"].flip(1))
        return functional.cross_entropy(scores, batch["y"]) + (scores - target).square().mean()


class BeforeAndAfter(models.MLP):
    """Two passes without gradients, around the one with gradients."""

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            before = self(batch["x"].flip(1))
        scores = self(batch["x"])
        with torch.no_grad():
            after = self(batch["x"] + 0.1 * before.mean(1, keepdim=True))
        return functional.cross_entropy(scores, batch["y"]) + ((scores - before) * after).square().mean()


class Noisy(models.Block):
    """Computes something else in training, as dropout does, but draws no random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.1 * x.sin() if self.training else 0.0)


class Evaluated(models.MLP):
    """A reference pass in evaluation mode. Code outside the stack differs in training, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(NUM_BLOCKS))
        self.last = Noisy()

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.embedding(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))

    def reference(self, batch: Batch) -> Tensor:
        self.eval()
        with torch.no_grad():
            target = self(batch["x"])
        self.train()
        return target

    def loss(self, batch: Batch) -> Tensor:
        target = self.reference(batch)
        scores = self(batch["x"])
        return functional.cross_entropy(scores, batch["y"]) + (scores - target).square().mean()


class EvaluatedAfter(Evaluated):
    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["x"])
        target = self.reference(batch)
        return functional.cross_entropy(scores, batch["y"]) + (scores - target).square().mean()


class Distilled(models.MLP):
    """The teacher is a frozen copy, made before the model's own blocks are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(nn.ModuleDict({"blocks": self.blocks, "head": self.head})).requires_grad_(False)
        self._modules["blocks"] = self._modules.pop("blocks")

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            x = self.embedding(batch["x"])
            for block in self.teacher["blocks"]:
                x = block(x)
            target = self.teacher["head"](x)
        return super().loss(batch) + (self(batch["x"]) - target).square().mean()


class ChosenAndRejected(models.MLP):
    """DPO: two passes with gradients."""

    def loss(self, batch: Batch) -> Tensor:
        chosen, rejected = self(batch["x"]), self(batch["x"].flip(1))
        return -functional.logsigmoid(chosen.logsumexp(1) - rejected.logsumexp(1)).mean()


class Concatenated(ChosenAndRejected):
    """The same in one pass."""

    def loss(self, batch: Batch) -> Tensor:
        chosen, rejected = self(torch.cat([batch["x"], batch["x"].flip(1)])).chunk(2)
        return -functional.logsigmoid(chosen.logsumexp(1) - rejected.logsumexp(1)).mean()


class Reasons(models.MLP):
    """The second pass works on what the first one has made."""

    def loss(self, batch: Batch) -> Tensor:
        x = y = self.embedding(batch["x"])
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
            x = x + y
        return functional.cross_entropy(self.head(x), batch["y"])


class FrozenFeatures(models.MLP):
    """Only the head is trained, on features that are computed without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class FrozenBlocks(models.MLP):
    """The first half of the stack runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        with torch.no_grad():
            for block in self.blocks[:4]:
                x = block(x)
        for block in self.blocks[4:]:
            x = block(x)
        return self.head(x)


class SometimesTwice(Before):
    """Makes another pass in some steps of an epoch."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) if self.global_step % 2 else models.MLP.loss(self, batch)


class FromAnEpochOn(Before):
    """Makes another pass from the second epoch on."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) if self.current_epoch else models.MLP.loss(self, batch)


class CountsPasses(models.MLP):
    """Counts its forwards, and weighs the loss with the count."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = self(batch["x"].flip(1))
        return super().loss(batch) + (self(batch["x"]) - target).square().mean() / self.count


class Normalized(Before):
    """A norm with running statistics before the stack, in training mode in both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


# in evaluation


class Validates(models.MLP):
    """`seen` gets what `validation_step` returns for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def val_dataloader(self) -> Any:
        return make_loader(models.vectors((8, 5), torch.float64))

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        for value in () if outputs is None else outputs.flatten():
            self.seen[str(len(self.seen))] = float(value)


class TwoForwards(Validates):
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        plain, flipped = self(batch["x"]), self(batch["x"].flip(1))
        self.log("gap", (plain - flipped).square().mean())
        return plain - flipped


class Repeats(Validates):
    """As many forwards as the label says: the steps of some micro-batches end early."""

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch["x"]
        for number in range(1 + int(batch["y"].max())):
            x = torch.where(batch["y"][:, None] > number, x + self(x).mean(1, keepdim=True), x)
        return x


class Generates(models.Trained):
    """Samples end at different lengths."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.options = options
        self.seen: dict[str, Any] = {}
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=NUM_BLOCKS, n_head=2, bos_token_id=0,
            eos_token_id=3, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def loss(self, batch: Batch) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def val_dataloader(self) -> Any:
        return make_loader(models.windows((8, 5)))

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        mask = torch.ones_like(tokens)
        made = self.model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=10, **self.options)
        return functional.pad(made, (0, tokens.shape[1] + 10 - made.shape[1]))

    on_validation_batch_end = Validates.on_validation_batch_end


def generates(**options: Any) -> Callable[[], LightningModule]:
    return partial(Generates, **options)


DIFFERENT_PASSES = Refused("ranks of a cube, whose samples differ, make different passes")

HABITS = [
    Habit("a pass under `torch.no_grad` before the one with gradients", Before, VECTORS, everywhere(EXACT), True),
    Habit("a pass under `torch.no_grad` after it", After, VECTORS, everywhere(EXACT), True),
    Habit("passes under `torch.no_grad` before and after it", BeforeAndAfter, VECTORS, everywhere(EXACT), True),
    Habit("such a pass with `accumulate_grad_batches=2`", Before, VECTORS, everywhere(EXACT), True,
          trainer=partial(dict, accumulate_grad_batches=2)),
    Habit("a reference pass between `self.eval()` and `self.train()`", Evaluated, VECTORS, everywhere(EXACT), True),
    Habit("the same, after the pass with gradients", EvaluatedAfter, VECTORS, everywhere(EXACT), True),
    Habit("a frozen teacher, made by `deepcopy`", Distilled, VECTORS, everywhere(EXACT), True),
    Habit("two passes with gradients: DPO's chosen and rejected", ChosenAndRejected, VECTORS, everywhere(EXACT)),
    Habit("the same in one pass: `torch.cat`, and `chunk` of the output", Concatenated, VECTORS, everywhere(EXACT)),
    Habit("a second pass with gradients on the first one's output", Reasons, VECTORS, everywhere(EXACT)),
    Habit("a head on features of a frozen stack, under `torch.no_grad`", FrozenFeatures, VECTORS, everywhere(EXACT)),
    Habit("only the first blocks under `torch.no_grad`", FrozenBlocks, VECTORS,
          everywhere(Refused("is called with grad mode on, and the blocks before it with grad mode off"))),
    Habit("another pass in some steps", SometimesTwice, VECTORS,
          everywhere(Refused("All steps of a training epoch must make the same passes"))),
    Habit("another pass from the second epoch on", FromAnEpochOn, partial(models.vectors, (8, 6), torch.float64),
          everywhere(EXACT)),
    Habit("a count of the passes, which the step uses", CountsPasses, VECTORS,
          everywhere(Refused("is changed in the step before the blocks are called and again after it"))),
    Habit("BatchNorm in two passes, in training mode", Normalized, partial(models.vectors, (8, 8, 8), torch.float64),
          everywhere(EXACT)),
    Habit("two forwards in `validation_step`", TwoForwards, VECTORS, everywhere(EXACT), True),
    Habit("a number of forwards that depends on the samples", Repeats, VECTORS, everywhere(EXACT)),
    Habit("`generate(use_cache=False)` in `validation_step`", generates(use_cache=False), TEXTS,
          on(pipelines=EXACT, cubes=DIFFERENT_PASSES)),
    Habit("`generate(use_cache=False)` with `cube_outside='replicate'`", generates(use_cache=False), TEXTS,
          everywhere(EXACT), True, strategy={"cube_outside": "replicate"}),
    Habit("`generate(use_cache=False)` with `min_new_tokens` equal to `max_new_tokens`",
          generates(use_cache=False, min_new_tokens=10), TEXTS, everywhere(EXACT), True),
    Habit("`generate` with its cache", generates(), TEXTS,
          everywhere(Refused("A cache lives inside one forward"))),
]  # fmt: skip
