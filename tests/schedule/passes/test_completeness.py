"""Tables with their own communication: ours and torch's are complete, and every change to them is found."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Action, Schedule, complete
from lightning_hanayo.schedule.completeness import check_communication
from lightning_hanayo.schedule.text.csv_table import read_table
from tests.schedule.samples import make, row, schedules, table, unhurried
from tests.schedule.test_torch_oracle import loaded

PAIR = table("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", stage_ranks=(0, 1), num_microbatches=2)
WHOLE = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)


def check(*rows: str) -> None:
    check_communication(PAIR, [row(one) for one in rows])


@unhurried
@given(schedules())
def test_our_own_communication_is_complete(schedule: Schedule) -> None:
    check_communication(schedule, complete(schedule))
    check_communication(schedule, schedule.actions)


@unhurried
@given(schedules(max_ranks=4), st.data())
def test_a_missing_message_is_found(schedule: Schedule, data: st.DataObject) -> None:
    lists = [list(one) for one in complete(schedule)]
    sends = [(rank, action) for rank, one in enumerate(lists) for action in one if action.kind.is_message]
    if len(sends) < 2:
        return
    rank, action = data.draw(st.sampled_from(sends))
    lists[rank].remove(action)
    with pytest.raises(HanayoError, match=f"{action} is missing on rank {rank}"):
        check_communication(schedule, lists)


def test_a_pair() -> None:
    check(*WHOLE)


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("0SEND_F1 ", "", "rank 0, position 2: 0SEND_F1 is missing on rank 0"),
        ("0SEND_F1 ", "0SEND_F1 0SEND_F1 ", "rank 0, position 4: 0SEND_F1 appears twice, first on rank 0"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "rank 0, position 0: 0SEND_F0 comes before 0F0, which it needs"),
        ("0RECV_B0 0B0", "0B0 0RECV_B0", "rank 0, position 4: 0B0 comes before 0RECV_B0, which it needs"),
        ("0F1 ", "0F1 1SEND_B1 ", "rank 0, position 3: 1SEND_B1 doesn't belong here: it belongs on rank 1"),
        ("0F1 ", "0F1 1SEND_F1 ", "rank 0, position 3: 1SEND_F1 doesn't belong here: nothing needs that message"),
        (
            "0RECV_B0 0B0 0RECV_B1",
            "0RECV_B1 0RECV_B0 0B0",
            "0RECV_B1 comes before 0RECV_B0, but rank 1 sends them the other way round",
        ),
    ],
)
def test_the_error_names_what_is_wrong(old: str, new: str, why: str) -> None:
    changed = WHOLE[0].replace(old, new)
    assert changed != WHOLE[0]
    with pytest.raises(HanayoError) as caught:
        check(changed, WHOLE[1].replace(" 1SEND_B1", "") if new == "0F1 1SEND_B1 " else WHOLE[1])
    assert why in str(caught.value)
    assert "[" in str(caught.value), "the table with a mark"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "hanayo"])
def test_torchs_lowered_tables_are_complete(tmp_path: Path, name: str) -> None:
    schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = make(name, 4, 6, 2)
    schedule.to_csv(tmp_path / "table.csv")
    runtime, _ = loaded(schedules, tmp_path / "table.csv", schedule)
    runtime._dump_csv(str(tmp_path / "lowered.csv"), format="compute_comms")
    lists, _ = read_table(tmp_path / "lowered.csv")
    assert any(action.kind.is_message for one in lists for action in one)
    check_communication(Schedule.from_csv(tmp_path / "lowered.csv"), lists)


def test_torchs_sharding_actions_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n")
    (only,), _ = read_table(tmp_path / "table.csv")
    assert only == (*row("0F0 0B0"), Action.parse("0REDUCE_GRAD"))
