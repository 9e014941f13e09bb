"""Precision plugins of Lightning's give the same gradients as in one process; fp16 with a scaler is refused."""

from typing import Any

import pytest
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.lightning.precision import check_precision
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, OutcomeCallback, data_rank, make_loader, make_trainer, merge


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
