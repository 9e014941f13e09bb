"""Summaries of models that are cut: the table is that of one process, before, in and after a run."""

import warnings
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_summary import ModelSummary, summarize

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_trainer

PLAIN = Layout()
LAYOUTS = [Layout(2, 2, 1), Layout(2, 1, 2), Layout(cube=(1, 2, 1))]


class WithExample(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(4, models.WIDTH)
        self.embedding.requires_grad_(False)


class Summarizes(Callback):
    """Summarizes the model in a hook, where a rank holds a part of it."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.texts += [str(summarize(pl_module, depth)) for depth in (1, -1)]


def summaries(layout: Layout) -> list[str]:
    """The texts before, in and after a run."""
    module, summarizes = models.build(WithExample), Summarizes()
    before = str(ModelSummary(module, max_depth=2))
    make_trainer(layout, max_steps=1, callbacks=[summarizes]).fit(module, make_loader(models.vectors((8,))))
    return [before, *summarizes.texts, str(ModelSummary(module, max_depth=2))]


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=LAYOUTS[-1:]), ids=str)
def test_the_table_is_that_of_one_process(pool: Pool, layout: Layout) -> None:
    (expected,) = pool.run(1, summaries, PLAIN)
    assert all(text.count("[4, 16]") >= 3 for text in expected)
    assert pool.run(layout.world_size, summaries, layout) == [expected] * layout.world_size


class ReadsValues(WithExample):
    def forward(self, x: Any) -> Any:
        return super().forward(x if bool((x == x).all()) else x.zero_())


def warned() -> tuple[str, bool]:
    """The text after a run that shows a summary, and whether a warning has said why."""
    module = models.build(ReadsValues)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(LAYOUTS[0], max_steps=1, enable_model_summary=True).fit(module, make_loader(models.vectors((8,))))
        text = str(summarize(module))
    assert all(part.training for part in module.modules())
    says_why = any("forward depends on more than the shapes" in str(one.message) for one in caught)
    return text, says_why


def test_a_forward_that_reads_values_has_no_sizes(pool: Pool) -> None:
    results = pool.run(2, warned)
    assert [says_why for _, says_why in results] == [True, False], "rank 0 says it"
    assert all("?" in text and "[4, 16]" not in text for text, _ in results)
