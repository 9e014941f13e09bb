"""Models with an encoder and a decoder train as in one process: one stack is cut, the other runs on pipeline rank 0.

rank 0   embedding   encoder   decoder 0 .       . 3   head
rank 1                                 . 1   2 .
"""

import logging
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor

from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import by_hand
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    Training,
    assert_close,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
    run,
)

IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
SIZES = {
    "vocab_size": models.VOCABULARY, "d_model": models.WIDTH, "encoder_layers": 4, "decoder_layers": 4,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "dropout": 0.0, "max_position_embeddings": 32, "forced_eos_token_id": 0,
}  # fmt: skip


def t5() -> LightningModule:
    """The first block of each stack makes the position bias of the others."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=models.VOCABULARY, d_model=models.WIDTH, d_ff=32, d_kv=8, num_layers=4, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return models.HuggingFace(T5ForConditionalGeneration(config))


def bart() -> LightningModule:
    """Learned positions; an encoder without causal mask."""
    from transformers import BartConfig, BartForConditionalGeneration

    return models.HuggingFace(BartForConditionalGeneration(BartConfig(**SIZES, **IDS)))


def whisper() -> LightningModule:
    """Two convolutions before the encoder, which gets no tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        **SIZES, **IDS, num_mel_bins=6, max_source_positions=8, max_target_positions=32, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    return models.HuggingFace(WhisperForConditionalGeneration(config))


def sounds(sizes: tuple[int, ...]) -> list[Batch]:
    """The labels of `texts`, and spectra instead of its tokens."""
    random = torch.Generator().manual_seed(4)
    batches = models.texts(sizes)
    return [
        {"input_features": torch.randn(len(batch["labels"]), 6, 16, generator=random), "labels": batch["labels"]}
        for batch in batches
    ]


KINDS: dict[str, tuple[Callable[[], LightningModule], Callable[..., list[Batch]], str]] = {
    "T5": (t5, models.padded, "model.encoder.block"),
    "BART": (bart, models.padded, "model.model.encoder.layers"),
    "Whisper": (whisper, sounds, "model.model.encoder.layers"),
}
LAYOUTS = [
    Layout(2, 1, 1),
    Layout(4, 1, 1, "1f1b"),
    Layout(2, 1, 2),
    Layout(2, 1, 1, "hanayo-zb"),
    Layout(cube=(1, 2, 1)),
    Layout(2, 1, 1, cube=(1, 1, 2)),
    Layout(2, 1, 1, cube=(1, 1, 2), outside="replicate"),
]


def training(kind: str) -> Training:
    model, batches, _ = KINDS[kind]
    made = partial(batches, (8, 8, 8))
    return TRAININGS.setdefault(kind, Training(model, made, torch.float64, steps=3, clip=0.1, loss_weight="tokens"))


TRAININGS: dict[str, Training] = {}


@pytest.mark.parametrize(("kind", "layout"), covered(product(KINDS, LAYOUTS), by=[("T5", LAYOUTS[0])]), ids=str)
def test_the_decoder_is_cut(pool: Pool, kind: str, layout: Layout) -> None:
    expected = by_hand(pool, training(kind), data=layout.data)
    assert_close(run(pool, training(kind), layout).weights, expected.weights, 1e-9)


def fit_with_encoder_cut(kind: str, layout: Layout) -> tuple[Outcome, list[str]]:
    """What a training comes to, and what is said of the stacks at set-up; the second run of a module says nothing."""
    one, callback = training(kind), OutcomeCallback()
    said: list[str] = []
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    module = models.build(one.model, one.dtype)
    loader = make_loader(one.share(0, 1))
    options = {"max_steps": one.steps, "gradient_clip_val": one.clip, "callbacks": [callback]}
    for limits in (options, {"max_steps": 0}):
        strategy = make_strategy(layout, loss_weight=one.loss_weight, blocks=KINDS[kind][2])
        make_trainer(layout, strategy=strategy, **limits).fit(module, loader)
    logger.removeHandler(handler)
    return callback.outcome, [line for line in said if "stacks of blocks" in line]


@pytest.mark.parametrize("kind", covered(KINDS, by=["T5"]))
def test_the_encoder_is_cut_where_it_is_named_and_set_up_says_what_stays_whole(pool: Pool, kind: str) -> None:
    layout, encoder = LAYOUTS[0], KINDS[kind][2]
    ranks = pool.run(layout.world_size, fit_with_encoder_cut, kind, layout)
    outcome = merge([one for one, _ in ranks], layout)
    assert_close(outcome.weights, by_hand(pool, training(kind)).weights, 1e-9)
    (line,) = ranks[0][1]
    assert f"one is cut: {encoder} (4 blocks" in line
    assert f"Whole on pipeline rank 0: {encoder.replace('encoder', 'decoder')} (" in line
    assert not ranks[1][1]


def generated(kind: str, stack: str, layout: Layout) -> list[Tensor]:
    """The tokens that the model generates for two batches, on pipeline rank 0."""
    make_model, batches, encoder = KINDS[kind]
    options = {"strategy": make_strategy(layout, blocks=encoder.replace("encoder", stack))} if stack else {}
    module = models.build(partial(Generates, make_model), torch.float64)
    data = [{name: value for name, value in one.items() if name != "labels"} for one in batches((8, 5))]
    trainer = make_trainer(layout, **options)
    found: Any = trainer.predict(module, make_loader([to_double(batch) for batch in data]))
    return found if trainer.strategy.global_rank == 0 else []


def to_double(batch: Batch) -> Batch:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


class Generates(models.Trained):
    """Generates six tokens for each sample."""

    def __init__(self, make_model: Callable[[], Any]) -> None:
        super().__init__()
        self.model = make_model().model

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens: Tensor = self.model.generate(**batch, use_cache=False, min_new_tokens=6, max_new_tokens=6)
        return tokens


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "stack"), list(product(KINDS, ("encoder", "decoder"))))
def test_generates_as_one_process_does(pool: Pool, kind: str, stack: str) -> None:
    (expected,) = pool.run(1, generated, kind, "", Layout())
    for made, wanted in zip(pool.run(2, generated, kind, stack, LAYOUTS[0])[0], expected, strict=True):
        assert made.tolist() == wanted.tolist()
