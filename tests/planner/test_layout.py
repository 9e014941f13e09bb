"""The layout: what "auto" chooses, and the errors where nothing fits."""

import re
from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.layout import Layout, check_schedule, choose
from lightning_hanayo.schedule import CostModel, Kind, Schedule, build, complete, schedule_names, validate

AUTO = [  # P, blocks -> schedule, W, B
    (2, 4, ("hanayo-zb", 1, 4)),
    (2, 8, ("hanayo-zb", 2, 4)),
    (4, 8, ("hanayo-zb", 1, 8)),
    (4, 15, ("hanayo-zb", 1, 8)),
    (4, 16, ("hanayo-zb", 2, 8)),
    (4, 7, ("1f1b", 1, 8)),
    (2, 2, ("1f1b", 1, 4)),
]


@pytest.mark.parametrize(("ranks", "blocks", "expected"), AUTO)
def test_auto(ranks: int, blocks: int, expected: tuple[str, int, int]) -> None:
    layout = choose(num_ranks=ranks, num_blocks=blocks)
    assert (layout.schedule, layout.num_waves, layout.num_microbatches) == expected
    per_rank = 2 * layout.num_waves if blocks >= 2 * ranks else 1
    assert layout.num_stages == per_rank * ranks <= blocks


def test_one_rank_has_one_stage_unless_a_schedule_is_named() -> None:
    alone = choose(num_ranks=1, num_blocks=1, num_microbatches=2)
    assert [str(action) for action in alone.table(2).actions[0]] == ["0F0", "0B0", "0F1", "0B1"]
    assert alone.num_stages == 1 and alone.ends_on_first_rank
    assert choose(num_ranks=1, num_blocks=8).num_microbatches == 1
    assert choose(num_ranks=1, num_blocks=8, num_waves=2).num_stages == 1
    assert choose(num_ranks=1, num_blocks=8, num_waves=2, schedule="hanayo").num_stages == 4


@pytest.mark.parametrize("most_waves", [2, pytest.param(8, marks=pytest.mark.thorough)])
def test_auto_takes_the_wave_that_simulates_best(most_waves: int) -> None:
    best = choose(num_ranks=4, num_blocks=8 * most_waves)
    some = [waves for waves in (1, 2, 4, 8) if waves <= most_waves]
    bubbles = [Layout(name, 4, waves, 8).predict() for name in ("hanayo", "hanayo-zb") for waves in some]
    assert best.predict() == pytest.approx(min(bubbles), abs=1e-3)


@pytest.mark.parametrize(
    ("schedule", "stages", "loss_stage"), [("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved", 8, 1), ("hanayo", 8, 0)]
)
def test_every_table_ends_on_rank_0(schedule: str, stages: int, loss_stage: int) -> None:
    layout = choose(num_ranks=4, num_blocks=8, num_waves=1, num_microbatches=8, schedule=schedule)
    assert layout.num_stages == stages
    for microbatches in (8, 5, 1):
        table = layout.table(microbatches)
        assert (table.stage_ranks[0], table.stage_ranks[-1], table.loss_stage) == (0, 0, loss_stage)
        assert (table.num_microbatches, table.num_stages) == (microbatches, stages + loss_stage)
        validate(table)


TOO_FEW = [
    ((4, 8, 2, "hanayo"), ["8 blocks", "16 stages", "pipeline_parallel_size=4, num_waves='auto', schedule='auto'"]),
    ((4, 5, 1, "hanayo"), ["5 blocks", "8 stages", "pipeline_parallel_size=4"]),
    ((2, 3, 1, "hanayo"), ["3 blocks", "4 stages", "pipeline_parallel_size=2"]),
    ((4, 3, "auto", "auto"), ["8 stages", "pipeline_parallel_size=2"]),
    ((2, 1, "auto", "hanayo"), ["1 block,", "4 stages", "pipeline_parallel_size=1"]),
    ((4, 3, 1, "1f1b"), ["3 blocks", "4 stages (1 per rank)", "pipeline_parallel_size=2"]),
    ((2, 3, "auto", "interleaved"), ["3 blocks", "4 stages (2 per rank)", "pipeline_parallel_size=2"]),
    ((1, 3, 2, "hanayo"), ["1 pipeline rank ", "pipeline_parallel_size=1"]),
]


@pytest.mark.parametrize(("asked", "named"), TOO_FEW)
def test_too_few_blocks_name_sizes_that_fit(asked: tuple[int, int, int, str], named: list[str]) -> None:
    ranks, blocks, waves, schedule = asked
    with pytest.raises(HanayoError) as caught:
        choose(num_ranks=ranks, num_blocks=blocks, num_waves=waves, schedule=schedule)
    message = str(caught.value)
    assert [part for part in named if part not in message] == [], message
    named_sizes = dict(re.findall(r"(\w+)=(\w+|'\w+')", message.partition("fits: ")[2]))  # which do fit
    sizes = {name: literal_eval(value) for name, value in named_sizes.items()}
    choose(num_ranks=sizes.pop("pipeline_parallel_size"), num_blocks=blocks, **sizes)


def test_a_table_from_a_file_works_for_smaller_batches(tmp_path: Path) -> None:
    path = str(tmp_path / "table.csv")
    build("hanayo", num_ranks=2, num_microbatches=6).to_csv(path)
    layout = choose(num_ranks=2, num_blocks=4, schedule=path)
    assert (layout.num_microbatches, layout.num_stages) == (6, 4)
    for microbatches in range(1, 7):
        validate(layout.table(microbatches))
        assert layout.table(microbatches).num_microbatches == microbatches
    with pytest.raises(HanayoError, match="a table for 6 micro-batches, and a batch has 7"):
        layout.table(7)


def test_a_table_for_other_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "table.csv")
    build("1f1b", num_ranks=4, num_microbatches=4).to_csv(path)
    with pytest.raises(HanayoError, match="is a table for 4 pipeline ranks, not 2"):
        choose(num_ranks=2, num_blocks=8, schedule=path)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("hanyo", "did you mean 'hanayo'"),
        ("chimera", "two ranks at once"),
        ("zero_bubble", "'zb-h1', 'zbv'"),
        ("nowhere.csv", "there is no such file"),
    ],
)
def test_schedules_that_training_rejects(name: str, named: str) -> None:
    with pytest.raises(HanayoError, match=named):
        check_schedule(name)


def test_a_table_that_begins_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("1F0,1B0\n0F0,0B0\n")
    with pytest.raises(HanayoError, match="has stage 0 on rank 1"):
        choose(num_ranks=2, num_blocks=8, schedule=str(path))


@pytest.mark.parametrize(
    ("schedule", "waves", "per_rank"),
    [("zb-h1", 1, 1), ("zbv", 1, 2), ("interleaved-zb", 1, 2), ("interleaved-zb", 2, 4)],
)
def test_a_split_backward(schedule: str, waves: int, per_rank: int) -> None:
    layout = choose(num_ranks=2, num_blocks=8, num_waves=waves, num_microbatches=4, schedule=schedule)
    assert layout.num_stages == 2 * per_rank
    assert any(action.kind is Kind.W for row in layout.table(4).actions for action in row)


def test_a_wave_ends_where_it_begins_and_a_loop_doesnt() -> None:
    assert choose(num_ranks=2, num_blocks=8).ends_on_first_rank
    assert not choose(num_ranks=2, num_blocks=8, schedule="1f1b").ends_on_first_rank


def test_steady_layouts_are_compared_by_what_each_step_adds() -> None:
    """P = 4, T_C = 0.05: one wave's steps overlap better, two waves' are shorter by themselves."""
    single, steady = (choose(num_ranks=4, num_blocks=16, num_microbatches=8, steady=steady) for steady in (False, True))
    assert (single.num_waves, steady.num_waves) == (2, 1)
    assert steady.step_time() < single.step_time() and steady.predict() > single.predict()


UNEVEN = CostModel(
    forward=(1.5, 1.5, 1, 1.5), backward_input=(2, 1.5, 1.5, 1.5), backward_weight=(1.5, 1.5, 2, 1), message=0.05
)
"""stages whose last weight gradients come in another order in a small batch than in a full one"""


def reductions(schedule: Schedule) -> list[list[int]]:
    """Per rank the stages whose gradients it reduces, in order."""
    return [[a.stage for a in actions if a.kind is Kind.REDUCE_GRAD] for actions in complete(schedule)]


def test_gradients_are_reduced_in_one_order_for_every_batch_size() -> None:
    """Data ranks match collectives by their order alone, and may play different numbers of micro-batches."""
    layout = choose(
        num_ranks=2, num_blocks=4, num_waves=1, schedule="hanayo-zb", num_microbatches=4, costs=UNEVEN, steady=True
    )
    as_done = [reductions(replace(layout.table(n), reduction_order=())) for n in (1, 4)]
    assert as_done[0] != as_done[1], "the case shows nothing"
    assert len({str(reductions(layout.table(n))) for n in (1, 2, 3, 4)}) == 1


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_reduces_in_one_order(name: str, ranks: int) -> None:
    layout = choose(num_ranks=ranks, num_blocks=64, num_waves=1, schedule=name, num_microbatches=2 * ranks)
    assert len({str(reductions(layout.table(n))) for n in range(1, 2 * ranks + 1)}) == 1
