"""Habits: what blocks get as arguments besides tensors, and gradients that the step takes itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from tests.habits.habit import EXACT, FP32_NORMS, Habit, HabitOutcome, Refused, everywhere, on
from tests.habits.layers import Causal as TransformersModel
from tests.harness import models
from tests.harness.models import CLASSES, NUM_BLOCKS, WIDTH, Batch, Block

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)
LENGTH = 6
PREFIX = 3


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


class Attention(nn.Module):
    """Two heads, with a cache or a mask of FlexAttention, which is made dense: on a CPU it has no backward."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any = None, past: Any = None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        if past is not None:
            key, value = past.update(key, value, self.layer_idx)
        dense = None if mask is None else create_mask(mask.mask_mod, *mask.shape, device=str(x.device))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Attends(models.MLP):
    """The mean over a sequence is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(i) for i in range(NUM_BLOCKS))

    def loss(self, batch: Batch) -> Tensor:
        x, arguments = self.embedding(batch["x"]), self.arguments(batch)
        for block in self.blocks:
            x = block(x, **arguments)
        return functional.cross_entropy(self.head(x.mean(1)), batch["y"])

    def arguments(self, batch: Batch) -> dict[str, Any]:
        raise NotImplementedError


def prefixes(encoder: nn.Embedding, size: int, config: Any = None) -> Any:
    """The cache that prefix tuning begins with: the same keys and values for all samples."""
    from transformers import DynamicCache

    split = encoder.weight.expand(size, -1, -1).unflatten(-1, (NUM_BLOCKS * 2, 2, -1)).permute(2, 0, 3, 1, 4)
    return DynamicCache([(key, value) for key, value in split.split(2)], config=config)


class PrefixTuned(Attends):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.prefix = nn.Embedding(PREFIX, NUM_BLOCKS * 2 * WIDTH)

    def arguments(self, batch: Batch) -> dict[str, Any]:
        return {"past": prefixes(self.prefix, len(batch["x"]))}


class PrefixTunedGPT2(models.HuggingFace):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.requires_grad_(False))
        self.prefix = nn.Embedding(PREFIX, NUM_BLOCKS * 2 * WIDTH)

    def loss(self, batch: Batch) -> Tensor:
        size, length = batch["input_ids"].shape
        past = prefixes(self.prefix, size, self.model.config)
        return self.model(**batch, past_key_values=past, attention_mask=torch.ones(size, PREFIX + length)).loss


def prefix_tuned_gpt2() -> LightningModule:
    return PrefixTunedGPT2(models.gpt2().model)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


class Causal(Attends):
    def arguments(self, batch: Batch) -> dict[str, Any]:
        return {"mask": create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")}


class Padded(Attends):
    """The mask's function refers to the lengths."""

    def arguments(self, batch: Batch) -> dict[str, Any]:
        lengths = batch["lengths"]

        def is_no_padding(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key < lengths[sample]

        return {"mask": create_block_mask(is_no_padding, len(lengths), None, LENGTH, LENGTH, device="cpu")}


class PackedAttention(Attention):
    """Attention within sequences that lie one after the other."""

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:  # type: ignore[override]
        ends = cu_seqlens.tolist()
        assert max_seqlen == max(stop - start for start, stop in zip(ends, ends[1:], strict=False))
        parts = x.split([stop - start for start, stop in zip(ends, ends[1:], strict=False)])
        return torch.cat([super(PackedAttention, self).forward(part[None])[0] for part in parts])


class Packed(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PackedAttention(i) for i in range(NUM_BLOCKS))

    def loss(self, batch: Batch) -> Tensor:
        lengths = batch["lengths"]
        x = torch.cat([one[:n] for one, n in zip(batch["x"], lengths.tolist(), strict=True)])
        cu_seqlens = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen=int(lengths.max()))
        means = torch.stack([one.mean(0) for one in x.split(lengths.tolist())])
        return functional.cross_entropy(self.head(means), batch["y"])


class Jagged(models.MLP):
    """Sequences of several lengths in a nested tensor, with a skip past the stack."""

    def loss(self, batch: Batch) -> Tensor:
        parts = [one[:n] for one, n in zip(batch["x"], batch["lengths"].tolist(), strict=True)]
        x = first = self.embedding(torch.nested.nested_tensor(parts, layout=torch.jagged))
        for block in self.blocks:
            x = block(x)
        means = torch.stack([one.mean(0) for one in (x + first).unbind()])
        return functional.cross_entropy(self.head(means), batch["y"])


class Collects(Block):
    def forward(self, x: Tensor, collected: list[Tensor]) -> Tensor:  # type: ignore[override]
        collected.append(x.square().mean())
        return super().forward(x)


class SharesKeys(nn.Module):
    """The second and third of eight blocks store keys in a dictionary for the seventh; all but the first count."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        if self.index in (1, 2):
            shared["keys"] = (self.linear(x).tanh(),)
        keys = shared["keys"][0] if self.index == 6 else x
        scale = shared["scale"]
        if self.index:
            shared["scale"] = scale + 0.25
        return x + self.linear(keys * scale).tanh()


class FillsDictionary(models.MLP):
    """Blocks fill a dictionary for later blocks and for the step; the step has put a value in, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SharesKeys(i) for i in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        shared: Any = self.new_dictionary()
        shared["scale"] = 0.5
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, shared)
        return self.head((x + shared["keys"][0].square()) / shared["scale"])

    def new_dictionary(self) -> Any:
        return {}


class FillsFirst(FillsDictionary):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].index = 1


class FillsUserDict(FillsDictionary):
    """As Gemma 3n's, with transformers' class."""

    def new_dictionary(self) -> Any:
        from transformers.cache_utils import KVSharingDict

        return KVSharingDict()


class ChangesBetween(FillsDictionary):
    """The step changes a dictionary between the blocks that fill it."""

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, Any] = {"scale": 0.5}
        x = self.embedding(x)
        for index, block in enumerate(self.blocks):
            shared["scale"] = 1 / (1 + index)
            x = block(x, shared)
        return self.head(x)


def gemma3n() -> LightningModule:
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        vocab_size=models.VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, vocab_size_per_layer_input=models.VOCABULARY, hidden_size_per_layer_input=8,
        num_kv_shared_layers=4, altup_num_inputs=2, laurel_rank=4, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * (NUM_BLOCKS // 2),
    )  # fmt: skip
    return TransformersModel(Gemma3nForCausalLM(config))


class ListArgument(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collects() for _ in range(NUM_BLOCKS))

    def loss(self, batch: Batch) -> Tensor:
        x, collected = self.embedding(batch["x"]), []
        for block in self.blocks:
            x = block(x, collected)
        return functional.cross_entropy(self.head(x), batch["y"]) + sum(collected)


class Calls(Block):
    def forward(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        return change(super().forward(x))


class CountingFunction(models.MLP):
    """Blocks call a function that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Calls() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        count = 0

        def damp(y: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return y / count

        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, damp)
        return self.head(x)


# gradients in the step


class Penalised(models.MLP):
    """WGAN-GP: the gradient's norm is 1."""

    def loss(self, batch: Batch) -> Tensor:
        point, scores = self.point(batch["x"])
        (gradient,) = torch.autograd.grad(scores, point, torch.ones_like(scores), create_graph=True)
        return self.cross_entropy(scores, batch) + (gradient.norm(dim=1) - 1).square().mean()

    def point(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self(x.requires_grad_())

    def cross_entropy(self, scores: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(scores, batch["y"])


class PenalisedOutput(Penalised):
    def point(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x, self.head(x)


class PenalisedEmbedding(Penalised):
    def point(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.embedding(x.requires_grad_()).tanh()

    def cross_entropy(self, scores: Tensor, batch: Batch) -> Tensor:
        return super().cross_entropy(self(batch["x"]), batch)


class AdaptiveWeight(models.MLP):
    """VQGAN: a loss weighted by the norm of the last layer's gradient."""

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        (gradient,) = torch.autograd.grad(loss, self.head.weight, retain_graph=True)
        return loss * (1 + gradient.norm().detach())


class BackwardInStep(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        loss.backward(retain_graph=True)
        return loss


class FunctionalGradient(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        return torch.func.grad(lambda x: self(x).sum())(batch["x"]).square().mean()


OTHER_SAMPLES = Refused("in this cube blocks work on other parts of the samples or features than the step")
"""the ranks of a cube share the samples of a micro-batch"""


def _habit(
    name: str,
    model: Callable[[], LightningModule],
    outcomes: dict[str, HabitOutcome],
    batches: Callable[[], list[Batch]] = VECTORS,
    **options: Any,
) -> Habit:
    return Habit(name, model, batches, outcomes, **options)


FILLED_BY_FIRST = Refused("changes a dict that it gets as an argument")
HABITS = [
    _habit("prefix tuning: a cache of trained keys and values", PrefixTuned, everywhere(EXACT), sequences),
    _habit(
        "prefix tuning of GPT-2",
        prefix_tuned_gpt2,
        on(pipelines=EXACT, cubes=OTHER_SAMPLES),
        partial(models.windows, (8, 8, 6)),
        tolerance=FP32_NORMS,
    ),
    _habit("a `BlockMask` of FlexAttention", Causal, everywhere(EXACT), sequences, always_exact=True),
    _habit("a `BlockMask` whose function refers to the batch", Padded, everywhere(EXACT), sequences, always_exact=True),
    _habit("packed sequences: `cu_seqlens` and `max_seqlen`", Packed, everywhere(EXACT), sequences, always_exact=True),
    _habit("jagged nested tensors", Jagged, everywhere(EXACT), sequences, always_exact=True),
    _habit(
        "a dictionary that blocks fill for later blocks, and the step reads",
        FillsDictionary,
        everywhere(EXACT),
        always_exact=True,
    ),
    _habit("a `KVSharingDict` likewise", FillsUserDict, everywhere(EXACT), always_exact=True),
    _habit("the same with `recompute='blocks'`", FillsUserDict, everywhere(EXACT), strategy={"recompute": "blocks"}),
    _habit("a dictionary that the first block fills, too", FillsFirst, on(pipelines=EXACT, cubes=FILLED_BY_FIRST)),
    _habit(
        "the same, which the step changes between the blocks",
        ChangesBetween,
        everywhere(Refused("changes a dict that it gets as an argument")),
    ),
    _habit(
        "Gemma 3n, whose last blocks get the keys and values of others",
        gemma3n,
        everywhere(EXACT),
        partial(models.windows, (8, 8, 6)),
        tolerance=1e-6,  # parts of it compute in fp32, and AdamW divides by roots
    ),
    _habit(
        "a list that all blocks get and append to",
        ListArgument,
        everywhere(Refused("changes a list that it gets as an argument")),
    ),
    _habit(
        "a function that all blocks call, and that counts its calls",
        CountingFunction,
        everywhere(Refused("changes a variable of CountingFunction")),
    ),
    _habit(
        "a gradient penalty through the stack",
        Penalised,
        everywhere(Refused("computes a gradient through the stack")),
    ),
    _habit("a gradient penalty at the stack's output", PenalisedOutput, everywhere(EXACT)),
    _habit("a gradient penalty on the embedding", PenalisedEmbedding, everywhere(EXACT)),
    _habit(
        "a weight from the gradient of the last layer",
        AdaptiveWeight,
        everywhere(EXACT),
    ),
    _habit(
        "`loss.backward()` in the step", BackwardInStep, everywhere(Refused(r"calls backward\(\)", "calls backward()"))
    ),
    _habit("`torch.func.grad` of the model", FunctionalGradient, everywhere(Refused("torch func level is 1"))),
]
