"""The BERT recipe is an ordinary LightningModule: a plain Trainer and a wave train it equally."""

import ast
import math
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.bert import module
from recipes.bert.module import BERT
from tests.harness import models
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_bit_equal, assert_close, assert_same_training, run


def tiny(**options: object) -> BERT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "context": 8, "num_layers": 2, "width": 16, "num_heads": 2}
    return BERT(**(sizes | options))  # type: ignore[arg-type]


def piped() -> BERT:
    """The model with as many blocks as the layouts below need."""
    return BERT(models.VOCABULARY, 16, models.NUM_BLOCKS, models.WIDTH, 2, learning_rate=3e-3, decay_steps=20)


class Unscheduled(BERT):
    """For the hand-written loop, which only steps an optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return super().configure_optimizers()["optimizer"]


def unscheduled() -> BERT:
    return Unscheduled(models.VOCABULARY, 16, models.NUM_BLOCKS, models.WIDTH, 2)


def gaps(samples: int) -> list[dict[str, torch.Tensor]]:
    """Each sequence repeats one number, and a 15 hides it once: its neighbours tell which."""
    rows = [torch.full((8,), number % 4 + 1) for number in range(samples)]
    hidden = [torch.arange(8) == place * 3 % 8 for place in range(samples)]
    return [
        {"input_ids": row.masked_fill(gap, 15), "labels": row.masked_fill(~gap, -100)}
        for row, gap in zip(rows, hidden, strict=True)
    ]


def test_it_does_not_import_this_package() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {
        getattr(node, "module", None) or node.names[0].name for node in ast.walk(tree) if hasattr(node, "names")
    }
    assert not any(str(name).startswith("lightning_hanayo") for name in imported)


@pytest.mark.thorough
def test_it_learns_in_one_process(tmp_path: Path) -> None:
    model = tiny(learning_rate=1e-2, warmup_steps=5, decay_steps=40)
    loader = DataLoader(gaps(56), batch_size=14)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=40,
        check_val_every_n_epoch=None,
        val_check_interval=40,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["train_loss"] < 0.5 < math.log(4)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]), rel=1e-4)


def test_every_token_attends_to_every_other() -> None:
    model = tiny().eval()
    ids = torch.randint(16, (1, 8))
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 16
    assert bool(((model(ids) - model(changed)).abs().amax(-1) > 0).all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_no_token_attends_to_padding(dtype: torch.dtype) -> None:
    model = tiny().eval()
    ids = torch.randint(16, (2, 8))
    mask = (torch.arange(8) < torch.tensor([[8], [5]])).to(dtype)
    torch.testing.assert_close(model(ids, mask)[1, :5], model(ids[1:, :5])[0])
    torch.testing.assert_close(model(ids, mask)[0], model(ids[:1])[0])


def test_decoder_and_embedding_share_a_weight_but_no_bias() -> None:
    model = tiny()
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    names = [name for name, parameter in model.named_parameters() if parameter.shape[0] == 16 and "token" in name]
    assert names == ["token.weight"] and model.head.decoder.weight is model.token.weight
    assert model.head.decoder.bias.grad is not None and bool((model.token.weight.grad[5] != 0).any())


def test_matrices_decay_and_other_parameters_do_not() -> None:
    decaying, others = tiny().configure_optimizers()["optimizer"].param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    assert {p.dim() for p in decaying["params"]} == {2} and {p.dim() for p in others["params"]} == {1}
    assert len(decaying["params"]) + len(others["params"]) == len(list(tiny().parameters()))


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    model = tiny(warmup_steps=4, decay_steps=24)
    rates = [model._learning_rate_at(step) for step in (0, 3, 4, 14, 24, 99)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.5, 0.0, 0.0])


def test_heads_that_do_not_divide_the_width_are_rejected() -> None:
    with pytest.raises(ValueError, match="width=16 doesn't divide into num_heads=3"):
        tiny(num_heads=3)


BATCHES = partial(models.padded, (8, 8, 8, 8))
SINGLE = Training(piped, BATCHES, accumulate=2, clip=0.1, loss_weight="tokens")
DOUBLE = Training(piped, BATCHES, torch.float64, accumulate=2, clip=0.1, loss_weight="tokens")
UNSCHEDULED = Training(unscheduled, BATCHES, loss_weight="tokens")


def test_a_wave_trains_it_like_one_process(pool: Pool) -> None:
    """Batches have padding and uneven numbers of labels; the plain run sees whole batches."""
    assert_same_training(run(pool, SINGLE, Layout(2, 2, 1)), plain(pool, SINGLE))


@pytest.mark.parametrize("layout", covered([Layout(2, 2, 1), Layout(2, 1, 2)], by=[Layout(2, 2, 1)]), ids=str)
def test_in_double_precision(pool: Pool, layout: Layout) -> None:
    assert_close(run(pool, DOUBLE, layout).weights, plain(pool, DOUBLE).weights, 1e-10)


def test_first_gradients_are_equal_bit_for_bit(pool: Pool) -> None:
    assert_bit_equal(run(pool, UNSCHEDULED, Layout(2, 1, 1)).gradients, by_hand(pool, UNSCHEDULED).gradients)
