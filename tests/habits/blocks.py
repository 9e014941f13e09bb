"""Habits: kinds of blocks, and of arguments that they get."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.habit import EXACT, Habit, HabitOutcome, everywhere
from tests.harness import models
from tests.harness.models import CLASSES, WIDTH, Batch, Block

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)
LENGTH = 6


def sequences() -> list[Batch]:
    """x [batch, seq, h] with the lengths of the sequences, and y [batch]."""
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=torch.float64),
            "lengths": torch.randint(2, LENGTH + 1, (size,), generator=generator),
            "y": torch.randint(CLASSES, (size,), generator=generator),
        }
        for size in (8, 8, 6)
    ]


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


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(models.NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CompiledBackbone(models.Trained):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(Backbone(), backend="aot_eager")

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.model(batch["x"]), batch["y"])


class CompiledFullGraph(CompiledBackbone):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model._orig_mod, backend="aot_eager", fullgraph=True)


class CompiledModule(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="aot_eager")


class CompiledStep(models.MLP):
    def configure_model(self) -> None:
        self.training_step = torch.compile(self.training_step, backend="aot_eager")


def compiled_around() -> Any:
    return torch.compile(models.MLP(), backend="aot_eager")


class DecoratedStep(models.MLP):
    @torch.compile(backend="aot_eager")
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


# stacks


class InSequential(models.Trained):
    def __init__(self) -> None:
        super().__init__()
        blocks = [Block() for _ in range(models.NUM_BLOCKS)]
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"])


class SkipBlock(nn.Module):
    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.block = Block()
        self.skip = nn.Linear(2 * WIDTH, WIDTH) if skip else None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip is not None:
            x = self.skip(torch.cat([x, skip], dim=-1))
        return self.block(x)


class UViT(models.Trained):
    """In-blocks, a middle one and out-blocks with long skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.in_blocks = nn.ModuleList(SkipBlock() for _ in range(8))
        self.middle = SkipBlock()
        self.out_blocks = nn.ModuleList(SkipBlock(skip=True) for _ in range(8))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        skips = []
        for block in self.in_blocks:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block in self.out_blocks:
            x = block(x, skips.pop())
        return self.head(x)

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"])


class UViTInOneList(models.Trained):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SkipBlock(skip=i > 4) for i in range(9))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        skips = []
        for i, block in enumerate(self.blocks):
            if i < 4:
                x = block(x)
                skips.append(x)
            elif i == 4:
                x = block(x)
            else:
                x = block(x, skips.pop())
        return self.head(x)

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"])


class Levels(models.MLP):
    """A list of lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for level in self.blocks:
            for block in level:
                x = block(x)
        return self.head(x)


class UnequalLevels(Levels):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(Block() for _ in range(n)) for n in (1, 5, 3))


class LevelsWithNorms(Levels):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for norm, up in self.blocks:
            x = x + up(norm(x))
        return self.head(x)


# caches


class PrefixAttention(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past: Any = None) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if past is not None:
            key, value = past.update(key, value, self.index)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Prefixes(models.Trained):
    """peft's prefix tuning: a frozen model whose blocks get a cache of trained keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(PrefixAttention(i) for i in range(models.NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.prefix = nn.Embedding(3, models.NUM_BLOCKS * 2 * WIDTH)

    def loss(self, batch: Batch) -> Tensor:
        x = self.embedding(batch["x"])
        past = self.past(len(x))
        for block in self.blocks:
            x = block(x, past=past)
        return functional.cross_entropy(self.head(x.mean(1)), batch["y"])

    def past(self, size: int) -> Any:
        from transformers import DynamicCache

        prefix = self.prefix.weight.expand(size, -1, -1).unflatten(-1, (models.NUM_BLOCKS * 2, 2, -1))
        keys = prefix.permute(2, 0, 3, 1, 4).split(2)
        return DynamicCache([(pair[0], pair[1]) for pair in keys])


def gpt2_with_prefixes() -> LightningModule:
    return GPT2Prefixes(models.gpt2().model)


class GPT2Prefixes(models.HuggingFace):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        model.requires_grad_(False)
        self.prefix = nn.Embedding(3, models.NUM_BLOCKS * 2 * WIDTH)

    def loss(self, batch: Batch) -> Tensor:
        from transformers import DynamicCache

        size, length = batch["input_ids"].shape
        prefix = self.prefix.weight.expand(size, -1, -1).unflatten(-1, (models.NUM_BLOCKS * 2, 2, -1))
        keys = prefix.permute(2, 0, 3, 1, 4).split(2)
        past = DynamicCache([(pair[0], pair[1]) for pair in keys], config=self.model.config)
        mask = torch.ones(size, length + 3, dtype=torch.long)
        return self.model(**batch, past_key_values=past, attention_mask=mask).loss


# teachers


class Teacher(models.MLP):
    """Mean teacher, copied in `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(nn.ModuleDict({"embedding": self.embedding, "blocks": self.blocks, "head": self.head}))
        self.teacher.requires_grad_(False)

    def teach(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.teacher["embedding"](x)
            for block in self.teacher["blocks"]:
                x = block(x)
            return self.teacher["head"](x)

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + functional.mse_loss(self(batch["x"]) if False else self.embedding(batch["x"])[:, :CLASSES], self.teach(batch["x"]))


class TeacherUpdated(Teacher):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for name in ("embedding", "blocks", "head"):
            for mean, new in zip(self.teacher[name].parameters(), getattr(self, name).parameters()):
                mean.lerp_(new, 0.1)


class TeacherInSetup(Teacher):
    def __init__(self) -> None:
        models.MLP.__init__(self)

    def setup(self, stage: str) -> None:
        self.teacher = copy.deepcopy(nn.ModuleDict({"embedding": self.embedding, "blocks": self.blocks, "head": self.head}))
        self.teacher.requires_grad_(False)


class TeacherOnFitStart(TeacherInSetup):
    def setup(self, stage: str) -> None:
        pass

    def on_fit_start(self) -> None:
        TeacherInSetup.setup(self, "fit")


class HiddenTeacher(TeacherInSetup):
    """An EMA that is not a submodule."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        teacher = self.teacher
        del self.teacher
        object.__setattr__(self, "teacher", teacher)


# gradient penalties


class Penalty(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        x = batch["x"].requires_grad_()
        scores = self(x)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return functional.cross_entropy(scores, batch["y"]) + (gradient.norm(dim=1) - 1).square().mean()


class PenaltyOnEmbedding(models.MLP):
    """The gradient of the head only."""

    def loss(self, batch: Batch) -> Tensor:
        x = self.embedding(batch["x"])
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return functional.cross_entropy(scores, batch["y"]) + (gradient.norm(dim=1) - 1).square().mean()


class GradOfParameter(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        (gradient,) = torch.autograd.grad(loss, self.embedding.weight, retain_graph=True)
        return loss * (1 + gradient.norm().detach())


class GradOfHead(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        (gradient,) = torch.autograd.grad(loss, self.head.weight, create_graph=True)
        return loss + gradient.square().sum()


class BackwardInStep(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        x = batch["x"].requires_grad_()
        self(x).sum().backward(retain_graph=True)
        return (x.grad.norm() - 1).square()


class PenaltyByVmap(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        gradient = torch.func.grad(lambda x: self(x).sum())(batch["x"])
        return super().loss(batch) + gradient.square().mean()


class Tangents(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        import torch.autograd.forward_ad as fwad
        with fwad.dual_level():
            out = self(fwad.make_dual(batch["x"], torch.ones_like(batch["x"])))
            primal, tangent = fwad.unpack_dual(out)
        return functional.cross_entropy(primal, batch["y"]) + tangent.square().mean()


class PenaltyAllowUnused(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        x = batch["x"].requires_grad_()
        scores = self(x) + x[:, :CLASSES]
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return functional.cross_entropy(scores, batch["y"]) + (gradient.norm(dim=1) - 1).square().mean()


class PenaltyBefore(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        x = batch["x"].requires_grad_()
        (gradient,) = torch.autograd.grad(self.embedding(x).tanh().sum(), x, create_graph=True)
        return super().loss(batch) + (gradient.norm(dim=1) - 1).square().mean()


class FunctionalTeacher(models.MLP):
    """A teacher whose weights are a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {name: p.detach().clone().double() * 0.5 for name, p in self.named_parameters()}

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = torch.func.functional_call(self, self.average, batch["x"])
        return super().loss(batch) if False else functional.mse_loss(self.embedding(batch["x"])[:, :5], target)


# arguments


class FlexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        from torch.nn.attention.flex_attention import create_mask

        (size, length), device = x.shape[:2], x.device
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        dense = create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], length, length, device=device)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


class Flex(models.Trained):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(FlexBlock() for _ in range(models.NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def mask(self, batch: Batch) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        size, length = batch["x"].shape[:2]
        return create_block_mask(causal, size, None, length, length, device="cpu")

    def loss(self, batch: Batch) -> Tensor:
        x, mask = self.embedding(batch["x"]), self.mask(batch)
        for block in self.blocks:
            x = block(x, mask)
        return functional.cross_entropy(self.head(x.mean(1)), batch["y"])


class FlexLengths(Flex):
    def mask(self, batch: Batch) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        size, length = batch["x"].shape[:2]
        lengths = batch["lengths"]

        def padded(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv < lengths[b]

        return create_block_mask(padded, size, None, length, length, device="cpu")


class PackedBlock(nn.Module):
    """Attention within sequences that are packed one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        parts = []
        for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            assert stop - start <= max_seqlen
            query, key, value = self.qkv(self.norm(x[start:stop])).chunk(3, -1)
            parts.append(functional.scaled_dot_product_attention(query, key, value))
        return x + self.out(torch.cat(parts))


class Packed(models.Trained):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(PackedBlock() for _ in range(models.NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: Batch) -> Tensor:
        lengths = batch["lengths"]
        x = torch.cat([one[:n] for one, n in zip(batch["x"], lengths.tolist(), strict=True)])
        cu_seqlens = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen=int(lengths.max()))
        means = torch.stack([one.mean(0) for one in x.split(lengths.tolist())])
        return functional.cross_entropy(self.head(means), batch["y"])


class Nested(models.MLP):
    """A jagged nested tensor through the stack."""

    def loss(self, batch: Batch) -> Tensor:
        parts = [one[:n] for one, n in zip(batch["x"], batch["lengths"].tolist(), strict=True)]
        x = self.embedding(torch.nested.nested_tensor(parts, layout=torch.jagged))
        for block in self.blocks:
            x = block(x)
        means = torch.stack([one.mean(0) for one in x.unbind()])
        return functional.cross_entropy(self.head(means), batch["y"])


class NestedSkip(models.MLP):
    """What is added after the stack has the same ragged dimension."""

    def loss(self, batch: Batch) -> Tensor:
        parts = [one[:n] for one, n in zip(batch["x"], batch["lengths"].tolist(), strict=True)]
        x = first = self.embedding(torch.nested.nested_tensor(parts, layout=torch.jagged))
        for block in self.blocks:
            x = block(x)
        means = torch.stack([one.mean(0) for one in (x + first).unbind()])
        return functional.cross_entropy(self.head(means), batch["y"])


class Collects(Block):
    def forward(self, x: Tensor, collected: list[Tensor]) -> Tensor:
        collected.append(x.square().mean())
        return super().forward(x)


class ListArgument(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collects() for _ in range(models.NUM_BLOCKS))

    def loss(self, batch: Batch) -> Tensor:
        x, collected = self.embedding(batch["x"]), []
        for block in self.blocks:
            x = block(x, collected)
        return functional.cross_entropy(self.head(x), batch["y"]) + sum(collected)


class NestedStrided(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        parts = [one[:n] for one, n in zip(batch["x"], batch["lengths"].tolist(), strict=True)]
        x = self.embedding(torch.nested.nested_tensor(parts))
        for block in self.blocks:
            x = block(x)
        means = torch.stack([one.mean(0) for one in x.unbind()])
        return functional.cross_entropy(self.head(means), batch["y"])


class NestedMaskBlock(Block):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.nested.to_padded_tensor(other, 0.0).sum(1)


class NestedArgument(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NestedMaskBlock() for _ in range(models.NUM_BLOCKS))

    def loss(self, batch: Batch) -> Tensor:
        parts = [one[:n] for one, n in zip(batch["x"], batch["lengths"].tolist(), strict=True)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
        x = self.embedding(batch["x"].mean(1))
        for block in self.blocks:
            x = block(x, nested)
        return functional.cross_entropy(self.head(x), batch["y"])


HABITS = [
    Habit("list compile", CompiledInList, VECTORS, everywhere(EXACT)),
    Habit("inplace compile", CompiledInPlace, VECTORS, everywhere(EXACT)),
    Habit("backbone compile", CompiledBackbone, VECTORS, everywhere(EXACT)),
    Habit("backbone fullgraph", CompiledFullGraph, VECTORS, everywhere(EXACT)),
    Habit("module.compile", CompiledModule, VECTORS, everywhere(EXACT)),
    Habit("compiled step", CompiledStep, VECTORS, everywhere(EXACT)),
    Habit("compiled around", compiled_around, VECTORS, everywhere(EXACT)),
    Habit("compiled decorated step", DecoratedStep, VECTORS, everywhere(EXACT)),
    Habit("sequential", InSequential, VECTORS, everywhere(EXACT)),
    Habit("uvit", UViT, VECTORS, everywhere(EXACT)),
    Habit("uvit one list", UViTInOneList, VECTORS, everywhere(EXACT)),
    Habit("levels", Levels, VECTORS, everywhere(EXACT)),
    Habit("unequal levels", UnequalLevels, VECTORS, everywhere(EXACT)),
    Habit("levels with norms", LevelsWithNorms, VECTORS, everywhere(EXACT)),
    Habit("prefixes", Prefixes, sequences, everywhere(EXACT)),
    Habit("gpt2 prefixes", gpt2_with_prefixes, partial(models.windows, (8, 8, 6)), everywhere(EXACT), tolerance=1e-6),
    Habit("teacher", Teacher, VECTORS, everywhere(EXACT)),
    Habit("teacher updated", TeacherUpdated, VECTORS, everywhere(EXACT)),
    Habit("teacher in setup", TeacherInSetup, VECTORS, everywhere(EXACT)),
    Habit("teacher on_fit_start", TeacherOnFitStart, VECTORS, everywhere(EXACT)),
    Habit("teacher hidden", HiddenTeacher, VECTORS, everywhere(EXACT)),
    Habit("penalty", Penalty, VECTORS, everywhere(EXACT)),
    Habit("penalty on head input", PenaltyOnEmbedding, VECTORS, everywhere(EXACT)),
    Habit("grad of parameter", GradOfParameter, VECTORS, everywhere(EXACT)),
    Habit("grad of head", GradOfHead, VECTORS, everywhere(EXACT)),
    Habit("backward in step", BackwardInStep, VECTORS, everywhere(EXACT)),
    Habit("penalty func", PenaltyByVmap, VECTORS, everywhere(EXACT)),
    Habit("penalty fwad", Tangents, VECTORS, everywhere(EXACT)),
    Habit("penalty unused", PenaltyAllowUnused, VECTORS, everywhere(EXACT)),
    Habit("penalty before", PenaltyBefore, VECTORS, everywhere(EXACT)),
    Habit("teacher functional", FunctionalTeacher, VECTORS, everywhere(EXACT)),
    Habit("flex", Flex, sequences, everywhere(EXACT)),
    Habit("flex lengths", FlexLengths, sequences, everywhere(EXACT)),
    Habit("packed", Packed, sequences, everywhere(EXACT)),
    Habit("nested", Nested, sequences, everywhere(EXACT)),
    Habit("nested skip", NestedSkip, sequences, everywhere(EXACT)),
    Habit("list argument", ListArgument, VECTORS, everywhere(EXACT)),
    Habit("nested strided", NestedStrided, sequences, everywhere(EXACT)),
    Habit("nested argument", NestedArgument, sequences, everywhere(EXACT)),
]
