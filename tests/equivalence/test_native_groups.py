"""Whole trainings through the branches for native groups (NCCL's): channels, and collectives of torch's own.

Stand-ins on the CPU compute exactly, so the results are those of one process. Every call on a group is counted:

a batch of 2 micro-batches on 2 ranks       rank 0  sends 0F0 0F1 3B0 3B1, and receives as many
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning import Trainer
from torch import Tensor

from lightning_hanayo.planner.layout import Layout as Plan
from lightning_hanayo.schedule import Kind, complete
from tests.equivalence.test_cube import EVEN, EVERYWHERE, MODELS, predicted, training
from tests.harness import models
from tests.harness import training as trainings
from tests.harness.native import Call, NativeGroup, native_groups
from tests.harness.oracle import by_hand, plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Outcome, OutcomeCallback, Training, assert_close, fit, merge

GPT = Training(
    partial(models.gpt, 4, 8), partial(models.texts, (8, 8, 8)), torch.float64, steps=3, clip=0.1, loss_weight="tokens"
)


class LastBatch(OutcomeCallback):
    """Keeps the calls of the latest batch."""

    calls: "Counter[Call]" = Counter()

    def on_train_batch_start(self, *_: Any) -> None:
        NativeGroup.calls.clear()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        LastBatch.calls = NativeGroup.calls.copy()
        super().on_train_batch_end(trainer)


def fit_natively(single: Training, layout: Layout) -> tuple[Outcome, Counter[Call]]:
    with native_groups(), patch.object(trainings, "OutcomeCallback", LastBatch):
        return fit(single, layout), LastBatch.calls


def run_natively(pool: Pool, single: Training, layout: Layout) -> tuple[Outcome, list[Counter[Call]]]:
    """The merged outcome, and each rank's calls in the last batch."""
    outcomes, calls = zip(*pool.run(layout.world_size, fit_natively, single, layout), strict=True)
    return merge(list(outcomes), layout), list(calls)


PIPES = [
    Layout(2), Layout(2, 2), Layout(2, 1, 2), Layout(4, schedule="1f1b"), Layout(2, 2, schedule="hanayo-zb"),
    Layout(2, schedule="interleaved"), Layout(1, 1, 2, schedule="1f1b"), Layout(2, schedule="zbv"),
]  # fmt: skip


@pytest.mark.parametrize("layout", covered(PIPES, by=[PIPES[4]]), ids=str)
def test_a_pipeline_sends_over_its_channels_what_the_table_says(pool: Pool, layout: Layout) -> None:
    outcome, calls = run_natively(pool, GPT, layout)
    assert_close(outcome.weights, by_hand(pool, GPT, layout.data).weights, 1e-10)
    table = Plan(layout.schedule, layout.pipe, layout.waves, layout.num_microbatches).table(layout.num_microbatches)
    for rank, own in enumerate(calls):
        pipe_rank = layout.topology.coordinates(rank)[1]
        kinds = Counter(action.kind for action in complete(table)[pipe_rank])
        assert own["channel", "send"] == kinds[Kind.SEND_F] + kinds[Kind.SEND_B]
        assert own["channel", "receive"] == kinds[Kind.RECV_F] + kinds[Kind.RECV_B]
        stages = {action.stage for action in table.actions[pipe_rank]}
        assert own["data", "all_reduce"] == (len(stages) if layout.data > 1 else 0)
        assert {call.purpose for call in own} <= {"channel", "data", "replica"}


@pytest.mark.parametrize("num_microbatches", covered((1, 2, 4), by=(2,)))
def test_a_registered_block_in_a_cube_makes_four_calls_each_way(pool: Pool, num_microbatches: int) -> None:
    """Two blocks, whose attention and feed-forward network gather their input and scatter their output, and back."""
    single, layout = training("gpt", EVEN), Layout(cube=(1, 2, 1), num_microbatches=num_microbatches)
    outcome, calls = run_natively(pool, single, layout)
    assert_close(outcome.weights, plain(pool, single).weights, MODELS["gpt"][2])
    outside, ends = 1, 2 * 2  # parameters outside of the stack, in one bucket; reshards, forward and backward
    for own in calls:
        assert own["cube", "all_gather"] == own["cube", "reduce_scatter"] == outside + num_microbatches * 2 * 4
        assert own["cube", "all_to_all"] == num_microbatches * ends


GRID = list(product(MODELS, EVERYWHERE))
OTHERS = [
    ("mixer", Layout(cube=(1, 1, 2), outside="replicate")),
    ("gpt", Layout(cube=(2, 2, 2), num_microbatches=1)),
    ("BERT", EVERYWHERE[-1]),
]


@pytest.mark.parametrize(("kind", "layout"), covered([*OTHERS[:2], *GRID], by=OTHERS[:1]), ids=str)
def test_every_kind_of_block_trains_as_one_process_does(pool: Pool, kind: str, layout: Layout) -> None:
    """All ranks of a cube make the same calls: another number on one of them would hang the others."""
    single = training(kind, EVEN)
    outcome, calls = run_natively(pool, single, layout)
    assert_close(outcome.weights, plain(pool, single).weights, MODELS[kind][2])
    for ranks in layout.topology.groups("x", "y", "z"):
        assert len({tuple(sorted(calls[rank].items())) for rank in ranks}) == 1


BF16 = replace(GPT, dtype=torch.float32, precision="bf16-mixed")


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [Layout(2), Layout(cube=(2, 2, 1)), Layout(2, 1, 2, cube=(1, 2, 1))], ids=str)
def test_bf16_is_close_to_one_process(pool: Pool, layout: Layout) -> None:
    outcome, _ = run_natively(pool, BF16, layout)
    assert outcome.losses == pytest.approx(plain(pool, BF16).losses, rel=2e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [Layout(2, 1, 2, cube=(1, 2, 1)), Layout(2, 2, 2, "hanayo-zb")], ids=str)
def test_accumulated_gradients_are_summed_over_data_ranks(pool: Pool, layout: Layout) -> None:
    single = replace(GPT, batches=partial(models.texts, (8, 8, 8, 8), (7,)), steps=2, accumulate=2)
    outcome, _ = run_natively(pool, single, layout)
    assert_close(outcome.weights, by_hand(pool, single, layout.data).weights, 1e-10)


def predicted_natively(layout: Layout) -> Tensor:
    with native_groups():
        return predicted(layout)


@pytest.mark.thorough
def test_predictions(pool: Pool) -> None:
    (expected,) = pool.run(1, predicted, Layout())
    for own in pool.run(4, predicted_natively, Layout(cube=(1, 2, 2))):
        assert torch.equal(own, expected)
