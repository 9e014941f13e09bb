"""Habits: kinds of blocks, where the stack is in the model, and copies of the model."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.habit import EXACT, Habit, HabitOutcome, Refused, everywhere, on
from tests.habits.parts import ANY_RANK, PART, full
from tests.harness import models
from tests.harness.models import CLASSES, WIDTH, Batch, Block

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)
NUM_BLOCKS = models.NUM_BLOCKS


# compiled


class CompiledInList(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            self.blocks[i] = torch.compile(block, backend="aot_eager")


class CompiledInPlace(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class Around(models.Trained):
    """The model is a child of the LightningModule, and compiled as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(models.MLP(), backend="eager", fullgraph=True)

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.model(batch["x"]), batch["y"])


class LogsUncompiled(models.MLP):
    """Lightning's `log` can't be compiled."""

    @torch.compiler.disable
    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)


class CompiledStep(LogsUncompiled):
    @torch.compile(backend="eager")
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


def compiled_module() -> Any:
    return torch.compile(LogsUncompiled(), backend="eager")


# where the blocks are


class InSequential(models.Trained):
    """The stack is a part of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block() for _ in range(NUM_BLOCKS)]
        ends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.net = nn.Sequential(ends[0], nn.Tanh(), *blocks, nn.LayerNorm(WIDTH), ends[1])

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.net(batch["x"]), batch["y"])


class ListOfLists(models.MLP):
    """Levels with several blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(Block() for _ in range(count)) for count in (1, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for level in self.blocks:
            for block in level:
                x = block(x)
        return self.head(x)


class Pairs(models.MLP):
    """Layers are pairs of modules, and the code between them is in the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(NUM_BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for norm, linear in self.blocks:
            x = x + linear(norm(x))
        return self.head(x)


class SkipBlock(Block):
    """Joins its input with the output of an earlier block."""

    def __init__(self, *, joins: bool = False) -> None:
        super().__init__()
        self.join = nn.Linear(2 * WIDTH, WIDTH) if joins else None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.join is not None and skip is not None:
            x = self.join(torch.cat([x, skip], dim=-1))
        return super().forward(x)


class UViT(models.MLP):
    """Blocks in, one in the middle, and blocks out with long skips."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SkipBlock() for _ in range(NUM_BLOCKS))
        self.middle = SkipBlock()
        self.out_blocks = nn.ModuleList(SkipBlock(joins=True) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.embedding(x), []
        for block in self.blocks:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block in self.out_blocks:
            x = block(x, skips.pop())
        return self.head(x)


class UViTInOneList(models.MLP):
    """The same, with the skips inside the stack: they pass stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SkipBlock(joins=i > 4) for i in range(9))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.embedding(x), []
        for i, block in enumerate(self.blocks):
            x = block(x, skips.pop() if i > 4 else None)
            if i < 4:
                skips.append(x)
        return self.head(x)


# copies


class Taught(models.MLP):
    """A teacher: a copy of the model that is not trained. What it says is a target."""

    def __init__(self) -> None:
        super().__init__()
        self.copy_model()

    def copy_model(self) -> None:
        parts = {"embedding": self.embedding, "blocks": self.blocks, "head": self.head}
        self.teacher = copy.deepcopy(nn.ModuleDict(parts)).requires_grad_(False)

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        x = self.teacher["embedding"](x)
        for block in self.teacher["blocks"]:
            x = block(x)
        return self.teacher["head"](x)

    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["x"])
        return functional.cross_entropy(scores, batch["y"]) + (scores - self.target(batch["x"])).square().mean()


class TaughtInSetup(Taught):
    def __init__(self) -> None:
        models.MLP.__init__(self)

    def setup(self, stage: str) -> None:
        self.copy_model()


class TaughtOnFitStart(Taught):
    def __init__(self) -> None:
        models.MLP.__init__(self)

    def on_fit_start(self) -> None:
        self.copy_model()


class TeacherFollows(Taught):
    """The teacher is a moving average of the model."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for name in ("embedding", "blocks", "head"):
            for mean, parameter in zip(self.teacher[name].parameters(), getattr(self, name).parameters(), strict=True):
                mean.lerp_(self.whole(parameter), 0.1)

    def whole(self, parameter: Tensor) -> Tensor:
        return parameter


class TeacherFollowsWhole(TeacherFollows):
    def whole(self, parameter: Tensor) -> Tensor:
        return full(self, parameter)


class OtherWeights(models.MLP):
    """The model runs with weights from a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, batch: Batch) -> Tensor:
        weights = {"head.weight": self.head.weight * self.scale}
        return functional.cross_entropy(torch.func.functional_call(self, weights, batch["x"]), batch["y"])


class OtherHeadWeights(OtherWeights):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return torch.func.functional_call(self.head, {"weight": self.head.weight * self.scale}, x)

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"])


def _habit(name: str, model: Callable[[], LightningModule], outcomes: dict[str, HabitOutcome], **options: Any) -> Habit:
    return Habit(name, model, VECTORS, outcomes, **options)


HABITS = [
    _habit("`self.blocks[i] = torch.compile(block)`", CompiledInList, everywhere(EXACT), always_exact=True),
    _habit("`block.compile()`", CompiledInPlace, everywhere(EXACT), always_exact=True),
    _habit("`self.model = torch.compile(model, fullgraph=True)`", Around, everywhere(EXACT), always_exact=True),
    _habit("`trainer.fit(torch.compile(module))`", compiled_module, everywhere(EXACT), always_exact=True),
    _habit("`@torch.compile` on `training_step`", CompiledStep, everywhere(EXACT)),
    _habit("`nn.Sequential(embedding, *blocks, head)`", InSequential, everywhere(EXACT), always_exact=True),
    _habit("blocks in a list of lists", ListOfLists, everywhere(EXACT)),
    _habit("`for norm, linear in self.layers: x = x + linear(norm(x))`", Pairs, everywhere(EXACT)),
    _habit("U-ViT with lists of blocks in and out", UViT, everywhere(EXACT)),
    _habit("U-ViT in one list: outputs of blocks as arguments of later ones", UViTInOneList, everywhere(EXACT)),
    _habit("a teacher copied in `__init__`", Taught, everywhere(EXACT)),
    _habit("a teacher copied in `setup`", TaughtInSetup, everywhere(EXACT)),
    _habit(
        "a teacher copied in `on_fit_start`",
        TaughtOnFitStart,
        everywhere(Refused("has no values on pipeline rank")) | {"cube": PART},
    ),
    _habit("a teacher that follows the model, updated in a hook", TeacherFollows, everywhere(ANY_RANK)),
    _habit("the same with `full_parameter`, updated in a hook", TeacherFollowsWhole, on(pipelines=EXACT, cubes=PART)),
    _habit("`functional_call` around the stack", OtherWeights, everywhere(Refused("is replaced while the stack"))),
    _habit("`functional_call` of the head", OtherHeadWeights, everywhere(EXACT)),
]
