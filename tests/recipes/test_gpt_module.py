"""The GPT recipe is an ordinary LightningModule that a plain Trainer trains."""

import ast
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.gpt import module
from recipes.gpt.module import GPT, cross_entropy


def tiny(**options: object) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "context": 8, "num_layers": 2, "width": 16, "num_heads": 2}
    return GPT(**(sizes | options))  # type: ignore[arg-type]


def counting(samples: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards: the next token is always the number plus one."""
    rows = [(torch.arange(9) + start) % 16 for start in range(samples)]
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def test_it_does_not_import_this_package() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {
        getattr(node, "module", None) or node.names[0].name for node in ast.walk(tree) if hasattr(node, "names")
    }
    assert not any(str(name).startswith("lightning_hanayo") for name in imported)


def test_it_learns_in_one_process(tmp_path: Path) -> None:
    model = tiny(learning_rate=1e-2, warmup_steps=5, decay="cosine", decay_steps=60)
    loader = DataLoader(counting(64), batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=60,
        check_val_every_n_epoch=None,
        val_check_interval=60,
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
    assert metrics["train_loss"] < 0.5 < math.log(16) - 1
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]), rel=1e-4)


def test_it_is_causal() -> None:
    model = tiny().eval()
    ids = torch.randint(16, (1, 8))
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 16
    same = (model(ids) - model(changed)).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 5 + [False] * 3


def test_head_and_embedding_are_one_parameter() -> None:
    model = tiny()
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    embeddings = [name for name, parameter in model.named_parameters() if parameter.shape[0] == 16 and "token" in name]
    assert embeddings == ["token.weight"]
    assert model.token.weight.grad is not None and bool((model.token.weight.grad[5] != 0).any())


def test_matrices_decay_and_other_parameters_do_not() -> None:
    optimizer = tiny().configure_optimizers()
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decaying["params"]} == {2} and {p.dim() for p in others["params"]} == {1}
    assert len(decaying["params"]) + len(others["params"]) == len(list(tiny().parameters()))


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    model = tiny(warmup_steps=4, decay="cosine", decay_steps=24)
    rates = [model._learning_rate_at(step) for step in (0, 3, 4, 14, 24, 99)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1, 0.1])


def test_labels_of_minus_100_do_not_count() -> None:
    logits, labels = torch.randn(2, 4, 16), torch.randint(16, (2, 4))
    labels[1] = -100
    torch.testing.assert_close(cross_entropy(logits, labels), cross_entropy(logits[:1], labels[:1]))


def test_heads_that_do_not_divide_the_width_are_rejected() -> None:
    with pytest.raises(ValueError, match="width=16 doesn't divide into num_heads=3"):
        tiny(num_heads=3)
