"""In a cube whose ranks all have one long sequence, each computes the loss of its part of the tokens."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hanayo import chunk_loss, chunked_cross_entropy
from lightning_hanayo.chunked_loss import token_shares
from lightning_hanayo.chunked_loss.cross_entropy import ChunkedLoss, Logits
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.losses import TokenLosses
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.tensor_parallel.mesh import Mesh, Pending
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Training,
    assert_close,
    make_loader,
    make_strategy,
    make_trainer,
    run,
)


def llama() -> LightningModule:
    """With as many heads of keys as a cube divides."""
    return models.llama(2, 2)


def untied() -> LightningModule:
    """GPT-2 with a head of its own."""
    module: Any = models.gpt2()
    module.model.lm_head.weight = torch.nn.Parameter(module.model.lm_head.weight.detach().clone())
    return module


def chunked() -> LightningModule:
    """The user has called `chunk_loss`."""
    module: Any = models.gpt2()
    chunk_loss(module.model, 3)
    return module


def recipe() -> LightningModule:
    """A step that calls `chunked_cross_entropy`."""
    from recipes.gpt.chunked import ChunkedGPT

    return ChunkedGPT(models.VOCABULARY, 16, models.NUM_BLOCKS, models.WIDTH, num_heads=2)


def frozen() -> LightningModule:
    """Neither embedding nor head is trained."""
    module: Any = models.gpt2()
    module.model.lm_head.weight.requires_grad_(False)
    return module


def generic() -> LightningModule:
    """Its blocks aren't registered. The head has a bias."""
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        vocab_size=models.VOCABULARY, hidden_size=models.WIDTH, intermediate_size=32, num_attention_heads=2,
        num_hidden_layers=models.NUM_BLOCKS, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
        pad_token_id=None,
    )  # fmt: skip
    return models.HuggingFace(PhiForCausalLM(config))


class ComputedHead(models.HuggingFace):
    """The head's weight isn't a parameter, but is computed from the embedding's; its bias is one."""

    is_chunked = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, models.VOCABULARY))

    def loss(self, batch: models.Batch) -> Tensor:
        body: Any = self.model.transformer
        hidden = body(batch["input_ids"]).last_hidden_state[:, :-1]
        weight, labels = normalize(body.wte.weight), batch["labels"][:, 1:]
        if self.is_chunked:
            return chunked_cross_entropy(hidden, weight, labels, self.bias, chunk=2, label_smoothing=0.1)
        return cross_entropy(linear(hidden, weight, self.bias).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def computed() -> LightningModule:
    module: Any = models.gpt2()
    return ComputedHead(module.model)


MODELS = [models.gpt2, llama, untied, frozen, generic, chunked, computed, recipe]
LAYOUTS = [
    Layout(1, 1, data, cube=cube, outside="tokens")
    for data, cube in [(1, (2, 1, 1)), (1, (1, 2, 1)), (2, (1, 1, 2)), (1, (2, 2, 1)), (1, (2, 1, 2))]
]
LAYOUTS += [Layout(2, 1, 1, cube=cube, outside="tokens") for cube in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)]]
LAYOUTS += [Layout(1, 1, 1, cube=(2, 1, 1), outside="replicate")]


@pytest.mark.parametrize(
    ("make", "layout"),
    covered(
        [
            case
            for case in product(MODELS, LAYOUTS)
            if case[1].outside == "tokens" or case[0] in (chunked, computed, recipe)
        ],
        by=[(llama, LAYOUTS[0])],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_trains_as_one_process_does(pool: Pool, make: Callable[[], LightningModule], layout: Layout) -> None:
    """Each micro-batch has one sequence, of 7 tokens, which no number of ranks divides; some labels are masked."""
    sizes = (4 * layout.data,) * 2
    batches = partial(models.texts, sizes, lengths=(7,))
    ours = run(pool, Training(make, batches, torch.float64, loss_weight="tokens", steps=2), layout)
    alone = run(pool, Training(partial(exact, make), batches, torch.float64, steps=2), Layout())
    is_fp64 = make is not llama  # transformers computes its norms in fp32, and Adam enlarges small gradients
    assert_close(ours.gradients, alone.gradients, 1e-12 if is_fp64 else 1e-7)
    assert_close(ours.weights, alone.weights, 1e-12 if is_fp64 else 3e-5)
    if layout.data == 1:  # the mean over data ranks isn't one over tokens
        assert ours.losses == pytest.approx(alone.losses, rel=1e-6)  # logged in fp32


def exact(make: Callable[[], LightningModule]) -> LightningModule:
    """With the loss of transformers in fp64, where its own is computed in fp32."""
    module: Any = make()
    if hasattr(module, "model"):
        vars(module.model.lm_head).pop("forward", None)
        module.model.loss_function = causal_loss
        module.is_chunked = False
    return module


def causal_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.thorough
@pytest.mark.parametrize("loss_weight", ["tokens", "shifted_tokens", "samples"])
def test_weighs_micro_batches_as_without_a_cube(pool: Pool, loss_weight: Any) -> None:
    """The recipe's model counts all labels, GPT-2 all but the first of each sequence, which is masked here."""
    make = models.gpt2 if loss_weight != "samples" else recipe
    batches = models.windows if loss_weight == "samples" else models.texts
    training = Training(make, partial(batches, (3,)), torch.float64, loss_weight=loss_weight, steps=1)
    ours = run(pool, training, Layout(cube=(1, 2, 1), outside="tokens", num_microbatches=2))
    alone = run(pool, replace(training, model=partial(exact, make), loss_weight="samples"), Layout())
    assert_close(ours.gradients, alone.gradients, 1e-12)


def fit(make: Callable[[], LightningModule], layout: Layout, batches: list[Any]) -> LightningModule:
    """Train one step on this rank."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")  # the recipe's model has a validation_step
    module = models.build(make)
    trainer = make_trainer(layout, strategy=make_strategy(layout, loss_weight="tokens"), max_steps=1)
    trainer.fit(module, make_loader(batches))
    return module


def largest_logits(make: Callable[[], LightningModule], layout: Layout) -> tuple[int, int]:
    """The most elements of a tensor with a column for each entry of the vocabulary, or for each of this rank's rows.

    But for the head's weight. A step's forward has a thread of its own, with modes of its own.
    """
    whole, part = watched_logits(make, layout, models.VOCABULARY), own_rows(layout)
    return whole, watched_logits(make, layout, part)


def own_rows(layout: Layout) -> int:
    """Of the head's weight, on this rank of a cube."""
    size, rank = prod(layout.cube), int(os.environ["RANK"])
    part = -(-models.VOCABULARY // size)
    return min(part, models.VOCABULARY - rank * part)


def watched_logits(make: Callable[[], LightningModule], layout: Layout, columns: int) -> int:
    in_step, elsewhere = (Watch(columns, {(models.WIDTH, columns)}) for _ in range(2))

    def watched() -> LightningModule:
        module = make()

        class Watched(type(module)):  # type: ignore[misc]
            def training_step(self, *args: Any) -> Any:
                with in_step:
                    return super().training_step(*args)

        module.__class__ = Watched
        return module

    with elsewhere:
        fit(watched, layout, models.texts((1,), lengths=(15,)))
    return max(in_step.largest, elsewhere.largest)


class Watch(TorchDispatchMode):
    """Notes the largest tensor whose last dimension is the vocabulary."""

    def __init__(self, vocabulary: int, weights: set[tuple[int, ...]], *, on_meta: bool = False) -> None:
        super().__init__()
        self.vocabulary, self.weights, self.on_meta = vocabulary, weights, on_meta
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        of_vocabulary = (
            tensor
            for tensor in tree_leaves(made)
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (self.vocabulary,)
        )
        for tensor in of_vocabulary:
            if tensor.is_meta == self.on_meta and tuple(tensor.shape) not in self.weights:
                self.largest = max(self.largest, tensor.numel())
        return made


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "cube", "outside", "tokens", "rows"),
    covered(
        [
            (llama, (2, 1, 2), "share", 15, None),
            (llama, (2, 1, 2), "tokens", 0, [10, 10, 10, 7]),
            (recipe, (1, 2, 1), "tokens", 0, [19, 18]),
            (models.gpt2, (1, 1, 2), "tokens", 0, [19, 18]),
            (computed, (1, 2, 1), "tokens", 2, None),
        ],
        by=[(llama, (2, 1, 2), "tokens", 0, [10, 10, 10, 7])],
    ),
)
def test_a_rank_makes_logits_of_its_rows_or_of_its_tokens_alone(
    pool: Pool,
    make: Callable[[], LightningModule],
    cube: tuple[int, int, int],
    outside: str,
    tokens: int,
    rows: list[int] | None,
) -> None:
    """Of 15 tokens. If the head's weight is a parameter, it stays sharded by rows: no rank makes whole logits."""
    layout = Layout(cube=cube, outside=outside, num_microbatches=1)
    made = pool.run(layout.world_size, largest_logits, make, layout)
    assert [whole for whole, _ in made] == [tokens * models.VOCABULARY] * layout.world_size
    if rows is not None:
        assert [part for _, part in made] == [15 * own for own in rows]


@dataclass
class OfEight:
    """One of the 8 ranks of a cube, alone."""

    rank: int
    size: int = 8

    def all_gather(self, tensor: Tensor) -> Pending[Tensor]:
        return Pending.done(tensor.expand(self.size, *tensor.shape))

    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        return Pending.done(tensor)


@pytest.mark.parametrize("chunk", [1024, 32 * 1024])
def test_logits_of_a_long_sequence_and_a_large_vocabulary(chunk: int) -> None:
    """One sequence of 32k tokens, 128k entries, on a cube (2, 2, 2): by shapes."""
    length, vocabulary, width, ranks = 32 * 1024, 128 * 1024, 64, OfEight(rank=7)
    hidden, weight = (torch.empty(size, width, device="meta", requires_grad=True) for size in (length, vocabulary))
    watch = Watch(vocabulary, {(width, vocabulary)}, on_meta=True)
    token_shares.start(shares := lambda: ranks)
    try:
        with watch:
            chunked_cross_entropy(
                hidden, weight, torch.empty(length, dtype=torch.long, device="meta"), chunk=chunk
            ).backward()
    finally:
        token_shares.stop(shares)
    whole = length * vocabulary * 4
    assert whole == 16 * 2**30
    assert watch.largest * 4 == min(whole // ranks.size, chunk * vocabulary * 4)


def test_a_loss_from_whole_logits_is_refused() -> None:
    losses, attributes = one_rank(models.gpt2, is_required=True), TemporaryAttributes()
    losses.start(attributes.set)
    try:
        with pytest.raises(UnsupportedError, match="HuggingFace.training_step has computed its loss from whole logits"):
            losses.check()
        with losses.in_batch(runs_alike=False):
            assert token_shares.token_shares() is None
        with losses.in_batch(runs_alike=True):
            assert token_shares.token_shares() is losses.ranks
            losses.check()
        assert token_shares.token_shares() is None
    finally:
        losses.stop()
        attributes.restore()


def one_rank(make: Callable[[], LightningModule], *, is_required: bool) -> TokenLosses:
    return TokenLosses(models.build(make), Mesh.single().axis("xyz"), is_required=is_required)


@pytest.mark.thorough
@pytest.mark.parametrize("pipe", [1, 2])
def test_a_loss_from_whole_logits_is_refused_in_the_first_step(pool: Pool, pipe: int) -> None:
    layout = Layout(pipe, cube=(2, 1, 1), outside="tokens")
    with pytest.raises(RunFailed, match=r"GPT\.training_step has computed its loss from whole logits"):
        pool.run(layout.world_size, fit, models.gpt, layout, models.texts((4,)))


def changes() -> tuple[bool, bool]:
    """Whether head and loss are the package's after a run."""
    module = fit(models.gpt2, Layout(cube=(1, 2, 1), outside="tokens"), models.texts((4,)))
    model: Any = module.model
    return "forward" in vars(model.lm_head), isinstance(model.loss_function, ChunkedLoss)


def test_a_run_leaves_head_and_loss_as_they_were(pool: Pool) -> None:
    assert pool.run(2, changes) == [(False, False)] * 2


class ReadsLogits(models.HuggingFace):
    """Logs the likeliest tokens."""

    def loss(self, batch: models.Batch) -> Tensor:
        outputs = self.model(**batch)
        assert isinstance(outputs.logits, Logits) and not outputs.logits.is_made
        self.log("likeliest", outputs.logits.argmax(-1).float().mean(), on_step=True)
        loss: Tensor = outputs.loss
        return loss


def reads_logits() -> LightningModule:
    module: Any = models.gpt2()
    return ReadsLogits(module.model)


def logged(make: Callable[[], LightningModule], layout: Layout) -> float:
    module = fit(make, layout, models.windows((4,)))
    return float(module.trainer.callback_metrics["likeliest"])


def test_logits_have_all_values_for_who_reads_them(pool: Pool) -> None:
    ours = pool.run(2, logged, reads_logits, Layout(cube=(2, 1, 1), outside="tokens"))
    outputs = models.build(models.gpt2).model(**models.windows((4,))[0])
    expected = outputs.logits.argmax(-1).float().mean().item()
    assert ours == pytest.approx([expected] * 2)
