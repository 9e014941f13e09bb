"""Any precision plugin of Lightning's keeps its class's name, which checkpoints store, and clips by the whole norm."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.lightning.precision import check_precision, clip_with
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, OutcomeCallback, data_rank, make_loader, make_trainer, merge

PLUGINS = [
    Precision,
    DoublePrecision,
    partial(HalfPrecision, "bf16-true"),
    partial(MixedPrecision, "bf16-mixed", "cpu"),
]


@pytest.mark.parametrize("make", PLUGINS)
def test_adapted_in_place(make: Any) -> None:
    plugin, kind, changes = make(), type(make()), TemporaryAttributes()
    before = (kind.__module__, kind.__qualname__)
    held = dict(vars(plugin))
    clipped: list[object] = []
    for name in "ab":  # a second Trainer brings its own
        clip_with(plugin, lambda parameters, value, name=name: clipped.append((name, value)), changes)
    assert isinstance(plugin, kind) and (type(plugin).__module__, type(plugin).__qualname__) == before
    assert type(plugin) is kind
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    plugin.clip_gradients(optimizer, 0.5, "norm")
    assert clipped == [("b", 0.5)]
    changes.restore()
    assert vars(plugin) == held
    plugin.clip_gradients(optimizer, 0.5, "norm")
    assert len(clipped) == 1


def test_fp16_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="precision='bf16-mixed'"):
        check_precision(MixedPrecision("16-mixed", "cpu"))
    with pytest.raises(UnsupportedError, match="precision='bf16-mixed'"):
        make_trainer(Layout(2), plugins=[MixedPrecision("16-mixed", "cpu")])


def train(layout: Layout, precision: str) -> Any:
    callback = OutcomeCallback()
    trainer = make_trainer(layout, max_steps=2, precision=precision, gradient_clip_val=0.1, callbacks=[callback])
    batches = [{k: v[data_rank(layout) :: layout.data] for k, v in b.items()} for b in models.vectors((8, 8))]
    trainer.fit(models.build(models.MLP), make_loader(batches))
    return callback.outcome


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 2e-2), ("bf16-true", 4e-2), ("64-true", 1e-12)])
@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(2, 1, 2)], ids=str)
def test_first_gradients(pool: Pool, layout: Layout, precision: str, tolerance: float) -> None:
    """Within the precision: bf16 has 8 bits, and the sums are cut in another way."""
    (alone,) = pool.run(1, train, Layout(), precision)
    ours = merge(pool.run(layout.world_size, train, layout, precision), layout)
    largest = max(g.abs().max().item() for g in alone.gradients.values())
    for name, expected in alone.gradients.items():
        assert ours.gradients[name].dtype == expected.dtype
        assert (ours.gradients[name] - expected).abs().max().item() <= tolerance * largest, name
