"""The line at the start of a training tells layout, schedule, samples per step and memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.planner.layout import choose
from lightning_hanayo.strategy.lightning.state import describe_run, held_bytes
from lightning_hanayo.topology import Topology


class _Stack:
    """Eight blocks."""

    name = "model.layers"

    def __len__(self) -> int:
        return 8


def describe(
    batch_size: int | None,
    *,
    accumulate: int = 1,
    data: int = 1,
    cube: tuple[int, int, int] = (1, 1, 1),
    once: bool = False,
) -> str:
    loaders = SimpleNamespace(flattened=[SimpleNamespace(batch_size=batch_size)])
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(_combined_loader=loaders), accumulate_grad_batches=accumulate
    )
    sizes: Any = {"num_ranks": 2, "num_blocks": 8, "num_waves": 2, "num_microbatches": 4}
    layout = choose(**sizes, schedule="hanayo", runs_step_once=once)
    ownership: Any = SimpleNamespace(stack=_Stack())
    topology = Topology(pipe=2, data=data, cube=cube)
    return describe_run(trainer, layout, ownership, topology, 2_500_000)


def test_lines_have_layout_schedule_and_memory() -> None:
    first, schedule, *_, memory = describe(16).splitlines()
    assert first == "model.layers: 8 blocks, 8 stages on 2 pipeline ranks, x 1 data = 2 ranks"
    assert "schedule        hanayo, 2 waves, 4 micro-batches: predicted bubble " in schedule
    assert memory == "  memory          2.5 MB of weights and gradients on the fullest rank"


def test_steps_that_run_once_hold_all_activations() -> None:
    assert "%. The step runs once a batch: all micro-batches' activations are held\n" in describe(16, once=True)


def test_no_more_micro_batches_are_promised_than_a_batch_has_samples() -> None:
    assert "2 micro-batches, as many as a batch has samples: predicted bubble " in describe(2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 16}, "a step takes 16, 16 for each data rank; ddp would take 32"),
        (
            {"batch_size": 8, "data": 2},
            "a step takes 16, 8 for each data rank; ddp would take 32",
        ),
        (
            {"batch_size": 4, "accumulate": 3},
            "a step takes 12, 12 for each data rank; ddp would take 24",
        ),
        (
            {"batch_size": 4, "cube": (2, 1, 1)},
            "a step takes 4, 4 for each data rank; ddp would take 16",
        ),
        ({"batch_size": None}, "a step takes one batch of the loader; ddp would take 2"),
        ({"batch_size": None, "data": 2}, "a step takes 2 batches of the loader; ddp would take 4"),
    ],
    ids=str,
)
def test_samples_are_those_of_the_layout_and_of_ddp(options: dict[str, Any], says: str) -> None:
    assert says in describe(**options)


def test_a_cube_is_named() -> None:
    assert "8 stages on 2 pipeline ranks in a 2x1x2 cube, x 1 data = 8 ranks" in describe(16, cube=(2, 1, 2))


def test_gradients_are_counted_where_there_will_be_some() -> None:
    module = nn.Linear(10, 10, bias=False)
    frozen = nn.Linear(10, 10, bias=False).requires_grad_(False)
    elsewhere = nn.Linear(10, 10, device="meta")
    half = nn.Linear(10, 10, bias=False, dtype=torch.bfloat16)
    assert held_bytes(nn.ModuleList([module, frozen, elsewhere, half])) == 800 + 400 + 400
