"""torch's own validator, lowering and simulator as an oracle: they accept every table we write."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hanayo.schedule import Action, Schedule, with_loss_stage
from tests.schedule.samples import NAMES, make, paired, split
from tests.schedule.torch_orders import as_text, torch_order

SIZES = [(1, 1, 1), (1, 3, 2), (2, 2, 1), (2, 5, 2), (3, 2, 1), (4, 4, 1), (4, 6, 2), (4, 8, 3), (5, 12, 2)]


@pytest.fixture(scope="module")
def torchs() -> Any:
    from torch.distributed.pipelining import schedules

    return schedules


def loaded(torchs: Any, path: Path, schedule: Schedule) -> tuple[Any, Callable[[int], int]]:
    """A torch runtime that has read the file, without the process group and the stages that it would need to run."""
    runtime = object.__new__(torchs._PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime._num_stages = schedule.num_stages
    runtime._n_microbatches = schedule.num_microbatches
    runtime.pp_group_size = schedule.num_ranks
    runtime._defer_pp_recv = False
    runtime._stages = [SimpleNamespace(stage_index_to_group_rank=None)]
    runtime._load_csv(str(path), format="compute_only")
    ranks = runtime.stage_index_to_group_rank
    return runtime, ranks.__getitem__


def variants(name: str, size: tuple[int, int, int]) -> list[Schedule]:
    schedule = make(name, *size)
    return [schedule, with_loss_stage(schedule), split(schedule)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_torch_accepts_our_tables(torchs: Any, tmp_path: Path, name: str, size: tuple[int, int, int]) -> None:
    for schedule in variants(name, size):
        schedule.to_csv(tmp_path / "table.csv")
        runtime, rank_of = loaded(torchs, tmp_path / "table.csv", schedule)
        assert tuple(rank_of(stage) for stage in range(schedule.num_stages)) == schedule.stage_ranks
        lowered = torchs._add_send_recv(
            {rank: list(actions) for rank, actions in runtime.pipeline_order.items()}, rank_of, schedule.num_stages
        )
        torchs._simulate_comms_compute(lowered, rank_of, schedule.num_stages)


@pytest.mark.parametrize("name", (*NAMES, "dualpipev"))
def test_torch_reads_our_communication_too(torchs: Any, tmp_path: Path, name: str) -> None:
    schedule = make(name, 3, 4, 2)
    schedule.to_csv(tmp_path / "table.csv", communication=True)
    for line in (tmp_path / "table.csv").read_text().splitlines():
        for cell in line.split(","):
            assert str(torchs._Action.from_str(cell)) == cell


def test_torch_rejects_what_we_reject(torchs: Any, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("0F0,0B0\n1F0\n")
    with pytest.raises(AssertionError):
        loaded(torchs, tmp_path / "table.csv", make("1f1b", 2, 1))


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_we_read_the_tables_torch_makes(tmp_path: Path, name: str) -> None:
    """DualPipeV's tables have cells with two actions."""
    order = torch_order(name, 4, 8, 2)
    (tmp_path / "torchs.csv").write_text("\n".join(map(",".join, order)))
    schedule = Schedule.from_csv(tmp_path / "torchs.csv")
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (4, 8, 8)
    cells = [[cell.removesuffix("OVERLAP_F_B").strip("()").split(";") for cell in row] for row in order]
    assert as_text(schedule) == [sum(row, []) for row in cells]


@pytest.mark.parametrize("name", (*NAMES, "dualpipev"))
def test_we_read_what_torch_completed(torchs: Any, tmp_path: Path, name: str) -> None:
    schedule = make(name, 4, 8, 2)
    schedule.to_csv(tmp_path / "table.csv")
    runtime, rank_of = loaded(torchs, tmp_path / "table.csv", schedule)
    order = {rank: torchs._add_unshard_reshard(actions) for rank, actions in runtime.pipeline_order.items()}
    lowered = torchs._add_send_recv(order, rank_of, schedule.num_stages)
    completed = [",".join(map(str, torchs._add_reduce_grad(row, 8))) for row in lowered.values()]
    (tmp_path / "completed.csv").write_text("\n".join(completed))
    again = Schedule.from_csv(tmp_path / "completed.csv")
    assert (again.actions, again.stage_ranks, again.pairs) == (schedule.actions, schedule.stage_ranks, schedule.pairs)


@pytest.mark.parametrize("name", ["dualpipev", "1f1b", "hanayo", "hanayo-zb"])
def test_torch_reads_pairs_of_a_forward_and_a_backward(torchs: Any, tmp_path: Path, name: str) -> None:
    """A pair is one cell there, and its sends come behind both. The simulator knows no pairs, but the runtime does."""
    schedule = make(name, 2, 4)
    schedule = schedule if schedule.pairs else paired(schedule)
    schedule.to_csv(tmp_path / "table.csv")
    runtime, rank_of = loaded(torchs, tmp_path / "table.csv", schedule)
    cells = {rank: list(actions) for rank, actions in runtime.pipeline_order.items()}
    both = [tuple(map(str, cell.sub_actions)) for row in cells.values() for cell in row if cell.sub_actions]
    assert schedule.pairs
    assert sorted(both) == sorted((str(first), str(second)) for first, second in schedule.pairs)
    torchs._add_send_recv(cells, rank_of, schedule.num_stages)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "hanayo"])
def test_torchs_lowered_tables_are_read_without_their_messages(torchs: Any, tmp_path: Path, name: str) -> None:
    schedule = make(name, 4, 6, 2)
    schedule.to_csv(tmp_path / "table.csv")
    runtime, _ = loaded(torchs, tmp_path / "table.csv", schedule)
    runtime._dump_csv(str(tmp_path / "lowered.csv"), format="compute_comms")
    assert "SEND_F" in (tmp_path / "lowered.csv").read_text()
    assert Schedule.from_csv(tmp_path / "lowered.csv").actions == schedule.actions


def test_torchs_sharding_actions_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n")
    assert Schedule.from_csv(tmp_path / "table.csv").actions == ((Action.parse("0F0"), Action.parse("0B0")),)
