"""An auxiliary loss that a function injects in a block's backward counts as in one process, whatever a batch's size.

batch of 8    4 micro-batches of 2    the injected means count 1/4 each
batch of 3    3 micro-batches of 1    1/3 each
batch of 7    2, 2, 2 and 1           1/4 each, and a warning
"""

import warnings

import pytest
import torch
from torch import Tensor

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, Outcome, OutcomeCallback, assert_close, make_loader, make_trainer, merge


class Balanced(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(models.Auxiliary.apply(x, 0.1 * x.square().mean()))  # type: ignore[no-untyped-call]


class InjectingMLP(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = Balanced


def train(layout: Layout, sizes: tuple[int, ...], accumulate: int) -> tuple[Outcome, list[str]]:
    """The outcome on this rank, and what it has warned of."""
    callback = OutcomeCallback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, max_epochs=1, callbacks=[callback], accumulate_grad_batches=accumulate)
        trainer.fit(models.build(InjectingMLP, torch.float64), make_loader(models.vectors(sizes, torch.float64)))
    return callback.outcome, [str(one.message) for one in caught if "auxiliary losses" in str(one.message)]


@pytest.mark.parametrize(
    ("sizes", "accumulate", "is_exact"),
    [((8, 3, 4), 1, True), ((8, 7), 1, False), ((8, 8, 3, 3), 2, True), ((8, 3), 2, False)],
    ids=str,
)
def test_means_count_by_the_number_of_micro_batches(
    pool: Pool, sizes: tuple[int, ...], accumulate: int, is_exact: bool
) -> None:
    layout = Layout(2, 1, 1)
    ((expected, _),) = pool.run(1, train, Layout(), sizes, accumulate)
    ranks = pool.run(2, train, layout, sizes, accumulate)
    warned = [text for _, texts in ranks for text in texts]
    if not is_exact:
        (text,) = warned
        assert "whose weights differ" in text and "Let num_microbatches divide" in text
    else:
        assert not warned
        assert_close(merge([outcome for outcome, _ in ranks], layout).weights, expected.weights, 1e-9)
