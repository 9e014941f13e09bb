"""Defines tiny models with properties that are difficult for a pipeline. None of them uses this package.

Each has eight blocks, enough for eight stages. Factories are top-level functions or classes, so that they can be sent
to a worker. `build(factory)` gives the same weights in every process.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Tensor]
NUM_BLOCKS = 8
WIDTH = 16
CLASSES = 5
VOCABULARY = 37
IGNORED = -100


def build(factory: Callable[[], LightningModule], dtype: torch.dtype = torch.float32) -> LightningModule:
    """The model with the initial values of seed 0, made in fp32, so that they are the same for every dtype."""
    torch.manual_seed(0)
    return factory().to(dtype)


class Trained(LightningModule):
    """AdamW with two param groups, weight decay on matrices only; the loss is logged."""

    learning_rate = 3e-3

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.learning_rate)


def optimizer_names(model: Trained) -> list[str]:
    """The names of the parameters of its optimizer, in order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[p] for group in model.configure_optimizers().param_groups for p in group["params"]]


class Block(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Auxiliary(torch.autograd.Function):
    """Returns a value as it is, and adds the gradient of a loss in its backward, as layers of experts do."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class MLP(Trained):
    """embedding -> eight blocks -> head. No parameter is shared, so gradients are summed in one order only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"])


class Frozen(MLP):
    """The embedding is frozen: no input gradient is needed in front of the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)


class Skip(MLP):
    """A skip connection from the embedding to the head."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


class Regularised(MLP):
    """A penalty on a parameter outside the stack."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 0.1 * self.embedding.weight.square().sum()


class SharesOutside(MLP):
    """A norm before the stack shares its weight with the last block, which in a wave is on rank 0, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.weight = self.blocks[-1].norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class SharesInside(MLP):
    """A layer of the first block and one of the last share a weight: in a wave both are on rank 0, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1].up.weight = self.blocks[0].up.weight


class Summed(MLP):
    """The loss is a sum over samples."""

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"], reduction="sum")


class Metrics(MLP):
    """Logs step values and epoch means. Validation logs a torchmetrics metric, and a loss that a scheduler monitors."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics.classification import MulticlassAccuracy

        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", batch["x"].max(), on_step=True, on_epoch=True, reduce_fx="max", sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self(batch["x"])
        self.accuracy(logits, batch["y"])
        self.log("val_loss", functional.cross_entropy(logits, batch["y"]), sync_dist=True)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        never_better = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": never_better, "monitor": "val_loss"}}


class MaskedBlock(nn.Module):
    """One attention head with a mask as an argument; input and output are tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: tuple[Tensor, Tensor], mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, residual = state
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(mixed), residual + 0.5 * x


class Masked(Trained):
    """Blocks alternately get a local and a global mask, as in Gemma; the state between them is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        local = causal.triu(-1)  # each token and the one before it
        x = self.embedding(tokens)
        state = (x, x)
        for index, block in enumerate(self.blocks):
            state = block(state, mask=causal if index % 2 else local)
        return self.head(state[0] + state[1])

    def loss(self, batch: Batch) -> Tensor:
        logits = self(batch["input_ids"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


class HuggingFace(Trained):
    """An unmodified model of transformers, which computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Batch) -> Tensor:
        return self.model(**batch).loss


def gpt2(heads: int = 2, blocks: int = NUM_BLOCKS) -> LightningModule:
    """Tied embeddings, `Conv1D` layers, the cache as a positional argument of each block."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=blocks, n_head=heads,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return HuggingFace(GPT2LMHeadModel(config))


def llama(heads: int = 2, kv_heads: int = 1, blocks: int = NUM_BLOCKS) -> LightningModule:
    """Rotary positions computed once and passed to all blocks; the cache as a keyword argument."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=blocks,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=32, pad_token_id=None,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return HuggingFace(LlamaForCausalLM(config))


def bert(heads: int = 2, blocks: int = NUM_BLOCKS) -> LightningModule:
    """An encoder. Its tied head has its own bias."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=blocks,
        num_attention_heads=heads, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return HuggingFace(BertForMaskedLM(config))


def gpt(heads: int = 2, blocks: int = NUM_BLOCKS) -> LightningModule:
    """The GPT of the recipe: tied embeddings."""
    from recipes.gpt.module import GPT

    sizes = {"vocab_size": VOCABULARY, "context": 16, "num_layers": blocks, "width": WIDTH}
    return GPT(**sizes, num_heads=heads, learning_rate=3e-3)


def vectors(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Batches of `sizes` samples for `MLP` and its subclasses."""
    random = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(size, WIDTH, generator=random).to(dtype),
            "y": torch.randint(CLASSES, (size,), generator=random),
        }
        for size in sizes
    ]


def texts(sizes: tuple[int, ...], lengths: tuple[int, ...] = (8,), dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Token batches. `labels` are the tokens, unevenly masked; the first one is always masked: causal models drop it.

    Batch i has length `lengths[i % len(lengths)]`.
    """
    random = torch.Generator().manual_seed(2)
    batches = []
    for index, size in enumerate(sizes):
        tokens = torch.randint(1, VOCABULARY, (size, lengths[index % len(lengths)]), generator=random)
        hidden = torch.rand(tokens.shape, generator=random) < torch.linspace(0, 0.8, size)[:, None]
        hidden[:, 0], hidden[:, 1] = True, False  # every sample keeps one label
        batches.append({"input_ids": tokens, "labels": tokens.masked_fill(hidden, IGNORED)})
    return batches


def padded(sizes: tuple[int, ...], lengths: tuple[int, ...] = (8,), dtype: torch.dtype = torch.float32) -> list[Batch]:
    """`texts` with right padding in the second half of each batch, so that some micro-batches have no padding."""
    batches = texts(sizes, lengths)
    for batch in batches:
        size, length = batch["input_ids"].shape
        kept = torch.full((size,), length)
        kept[size // 2 :] = torch.arange(size - size // 2) % (length - 3) + 3
        mask = (torch.arange(length) < kept[:, None]).long()
        batch["attention_mask"] = mask
        batch["input_ids"] = batch["input_ids"] * mask
        batch["labels"] = batch["labels"].masked_fill(mask == 0, IGNORED)
    return batches


def windows(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Batch]:
    """`texts` without masked labels, for models whose loss is a mean over samples."""
    return [{"input_ids": batch["input_ids"], "labels": batch["input_ids"].roll(-1, 1)} for batch in texts(sizes)]
