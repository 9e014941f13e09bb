"""Batches become micro-batches: by the usual rule, by the user's function, and for several loaders.

8 and 4 samples, 4 micro-batches   2 1 | 2 1 | 2 1 | 2 1          8 and 6: 4 3 | 4 3
"""

import warnings
from typing import Any

import pytest
import torch

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchRule, BatchSource
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.losses import LossWeighting, PieceWeights
from tests.habits.batches import CHANGED_IN_PLACE
from tests.habits.habit import check
from tests.harness.pool import Pool
from tests.harness.thorough import covered

QUARTERS = PieceWeights((0.25,) * 4, (0.25,) * 4, (0.25,) * 4)
LOADERS = BatchSource(loaders={"a": None, "b": None})


def split(batch: Any, limit: int, rule: BatchRule = BatchRule(), source: BatchSource = BatchSource()) -> SplitBatch:  # noqa: B008
    return BatchSplitter(rule).split(batch, limit, source)


def test_parts_of_different_sizes_are_cut_in_the_same_proportions() -> None:
    made = split({"a": torch.arange(8), "b": torch.arange(4)}, 4, source=LOADERS)
    assert [[len(part) for part in piece.values()] for piece in made.pieces] == [[2, 1]] * 4
    assert torch.equal(torch.cat([piece["b"] for piece in made.pieces]), torch.arange(4))
    merged = made.merge([piece["b"] for piece in made.pieces], QUARTERS, has_loss=False)
    assert torch.equal(merged, torch.arange(4)), "results as long as one of the parts are concatenated"


def test_fewer_micro_batches_are_announced() -> None:
    with pytest.warns(UserWarning, match="8 and 6 samples are cut into 2 micro-batches instead of 4"):
        made = split({"a": torch.arange(8), "b": torch.arange(6)}, 4, source=LOADERS)
    assert [[len(part) for part in piece.values()] for piece in made.pieces] == [[4, 3]] * 2


def test_parts_of_one_size_need_not_be_divisible() -> None:
    made = split({"a": torch.arange(7), "b": torch.arange(7)}, 4, source=LOADERS)
    assert [len(piece["a"]) for piece in made.pieces] == [2, 2, 2, 1]


def test_with_one_micro_batch_nothing_is_refused() -> None:
    batch = {"x": torch.ones(4, 2), "y": torch.ones(3)}
    made = split(batch, 1)
    batch["y"].add_(1)
    made.check()
    assert made.pieces == [batch]


def test_a_shared_tensor_that_a_step_changes_in_place_is_named() -> None:
    made = split({"x": torch.ones(4, 2), "more": [torch.ones(1, 5)]}, 4)
    made.check()
    made.pieces[0]["x"].add_(1)
    made.check()
    made.pieces[0]["more"][0].add_(1)
    with pytest.raises(UnsupportedError, match=r"changes batch\['more'\]\[0\] \(1, 5\) in place.*which 4 micro-b"):
        made.check()


@pytest.mark.parametrize("layout", covered(["pipeline", "cube"], by=["pipeline"]))
def test_steps_change_their_micro_batches_in_place(pool: Pool, layout: str) -> None:
    check(pool, CHANGED_IN_PLACE, layout)


def test_a_batch_without_samples_is_one_micro_batch() -> None:
    assert split(torch.ones(0, 2), 4).num_microbatches == 1


def by_two(batch: Any, n: int) -> list[Any]:
    return list(batch.split(2))


def test_the_users_function_is_checked() -> None:
    assert [len(piece) for piece in split(torch.ones(6), 4, BatchRule(split=by_two)).pieces] == [2, 2, 2]
    with pytest.raises(HanayoError, match=r"split_batch\(batch, 4\) returned 5 items; expected a list of 1 to 4"):
        split(torch.ones(10), 4, BatchRule(split=by_two))
    with pytest.raises(HanayoError, match="returned a Tensor"):
        split(torch.ones(10), 4, BatchRule(split=lambda batch, n: batch))


def test_samples_that_cant_be_counted_need_a_weight() -> None:
    """Graphs of 3 and 5 nodes: each piece alone looks like one of 3 or 5 samples."""
    graphs = {"nodes": torch.ones(8), "y": torch.ones(2)}

    def cut(batch: Any, n: int) -> list[Any]:
        return [{"nodes": nodes, "y": torch.ones(1)} for nodes in batch["nodes"].split((3, 5))]

    made = split(graphs, 4, BatchRule(split=cut))
    with pytest.raises(HanayoError, match="can't be counted in what split_batch returned.*loss_weight=lambda"):
        LossWeighting("samples", 1, None).for_training(made.pieces, made.sizes)
    found = LossWeighting(lambda piece: len(piece["y"]), 1, None).for_training(made.pieces, made.sizes)
    assert found.in_mean == (0.5, 0.5)
    results = [piece["nodes"] for piece in made.pieces]
    assert len(made.merge(results, found, has_loss=False)) == 8


def test_sequence_first_results_are_concatenated_along_their_samples() -> None:
    rule = BatchRule(batch_dim=1)
    x = torch.arange(15.0).reshape(3, 5, 1)
    made = split(x, 4, rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = made.merge(list(made.pieces), QUARTERS, has_loss=False)
    assert torch.equal(merged, x)
