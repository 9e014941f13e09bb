"""The line at the start of a training tells layout, schedule, samples per step and memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.planner.layout import choose
from lightning_hanayo.strategy.lightning.inspection import describe_run, held_bytes
from lightning_hanayo.topology import Topology


class _Stack:
    """Eight blocks."""

    name = "model.layers"

    def __len__(self) -> int:
        return 8


def describe(
    batch_size: int | None, *, accumulate: int = 1, data: int = 1, cube: tuple[int, int, int] = (1, 1, 1)
) -> str:
    trainer: Any = SimpleNamespace(
        train_dataloader=SimpleNamespace(batch_size=batch_size), accumulate_grad_batches=accumulate
    )
    layout = choose(num_ranks=2, num_blocks=8, num_waves=2, num_microbatches=4, schedule="hanayo")
    ownership: Any = SimpleNamespace(stack=_Stack())
    topology = Topology(pipe=2, data=data, cube=cube)
    return describe_run(trainer, layout, ownership, topology, 2_500_000)


def test_one_line_has_layout_schedule_and_memory() -> None:
    text = describe(16)
    assert text.startswith(
        "model.layers: 8 blocks, 8 stages on 2 pipeline ranks, x 1 data = 2 ranks. Schedule hanayo, "
    )
    assert "2 waves, 4 micro-batches, predicted bubble " in text
    assert text.endswith("Weights and gradients: 2.5 MB on the fullest rank.")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 16}, "A step takes 16 samples, 16 for each data rank; ddp would take 32."),
        (
            {"batch_size": 8, "data": 2},
            "A step takes 16 samples, 8 for each data rank; ddp would take 32.",
        ),
        (
            {"batch_size": 4, "accumulate": 3},
            "A step takes 12 samples, 12 for each data rank; ddp would take 24.",
        ),
        (
            {"batch_size": 4, "cube": (2, 1, 1)},
            "A step takes 4 samples, 4 for each data rank; ddp would take 16.",
        ),
        ({"batch_size": None}, "A step takes one batch of the loader; ddp would take 2."),
        ({"batch_size": None, "data": 2}, "A step takes 2 batches of the loader; ddp would take 4."),
    ],
    ids=str,
)
def test_samples_are_those_of_the_layout_and_of_ddp(options: dict[str, Any], says: str) -> None:
    assert says in describe(**options)


def test_a_cube_is_named() -> None:
    assert "8 stages on 2 pipeline ranks in a 2x1x2 cube, x 1 data = 8 ranks." in describe(16, cube=(2, 1, 2))


def test_gradients_are_counted_where_there_will_be_some() -> None:
    module = nn.Linear(10, 10, bias=False)
    frozen = nn.Linear(10, 10, bias=False).requires_grad_(False)
    elsewhere = nn.Linear(10, 10, device="meta")
    half = nn.Linear(10, 10, bias=False, dtype=torch.bfloat16)
    assert held_bytes(nn.ModuleList([module, frozen, elsewhere, half])) == 800 + 400 + 400
