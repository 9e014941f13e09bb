"""Hosts that block at messages all reach their ends: in any table, with any of its messages held up at both ends.

    rank 0   0F0  0SEND_F0 ........ held up until rank 1 is at 1RECV_F0
    rank 1   ...  1RECV_F0 ........ held up until rank 0 is at 0SEND_F0

On GPUs a channel's first use holds up both hosts, and a posted receive holds up its own one at the next synchronization
of the device (the allocator's retry, lazy loading of a kernel, user code). The model holds up both at every message.
Where fewer messages hold up hosts, nothing can hang then: hosts wait for a part of the same things.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path

import pytest
from hypothesis import given

from lightning_hanayo.planner.layout import choose
from lightning_hanayo.schedule import (
    Action,
    Kind,
    Schedule,
    complete,
    forward_only,
    last_backward_only,
    schedule_names,
    with_loss_stage,
    without_forwards,
)
from lightning_hanayo.schedule.table import source_stage
from tests.harness.thorough import covered
from tests.schedule.samples import make, row, schedules, split, table, unhurried

Item = tuple[int, Action]
"""An action in one of several parts or copies of a batch."""
Meets = Mapping[Item, Iterable[Item]]
"""For each item that holds up its host the items that other hosts must have reached."""


def held_up(rows: Sequence[Sequence[Item]], meets: Meets) -> list[str]:
    """Where hosts stand when none can go on; none is left if all have reached their ends."""
    place, reached = [0] * len(rows), set[Item]()
    waiting: dict[Item, list[int]] = defaultdict(list)
    awake = list(range(len(rows)))
    while awake:
        host = awake.pop()
        while place[host] < len(rows[host]):
            item = rows[host][place[host]]
            reached.add(item)
            awake += waiting.pop(item, ())
            missing = next((other for other in meets.get(item, ()) if other not in reached), None)
            if missing is not None:
                waiting[missing].append(host)
                break
            place[host] += 1
    return [str(items[at][1]) for items, at in zip(rows, place, strict=True) if at < len(items)]


def pairs(schedule: Schedule, rows: Iterable[Iterable[Action]]) -> Iterator[tuple[Action, Action]]:
    """Each receive and its send."""
    for action in chain(*rows):
        source = source_stage(action, schedule.num_stages)
        if action.kind in (Kind.RECV_F, Kind.RECV_B) and source is not None:
            send = Kind.SEND_F if action.kind is Kind.RECV_F else Kind.SEND_B
            yield action, Action(source, send, action.microbatch)


def hangs(*parts: Schedule) -> list[str]:
    """Where the parts of a batch, one after the other, hang if each message holds up both hosts."""
    rows: list[list[Item]] = [[] for _ in parts[0].actions]
    meets: dict[Item, list[Item]] = {}
    for number, part in enumerate(parts):
        completed = complete(part)
        for items, actions in zip(rows, completed, strict=True):
            items += [(number, action) for action in actions]
        for receive, send in pairs(part, completed):
            meets[number, receive], meets[number, send] = [(number, send)], [(number, receive)]
    return held_up(rows, meets)


def batches(schedule: Schedule) -> Iterator[tuple[Schedule, ...]]:
    """What a batch may consist of: a table, or parts of it (`strategy/pipeline.py`), and the batch after it."""
    everything = range(schedule.num_microbatches)
    forwards = forward_only(schedule)
    yield schedule, schedule
    yield forward_only(schedule, (0,)), without_forwards(schedule, (0,)), forwards
    yield forwards, forwards, without_forwards(schedule, everything)
    yield forward_only(schedule, (0,)), forward_only(schedule, everything[1:]), last_backward_only(schedule, everything)


def variants(name: str, num_ranks: int, num_microbatches: int, depth: int) -> Iterator[Schedule]:
    """The table as it is built and with a loss stage, and both with their backwards cut in two."""
    schedule = make(name, num_ranks, num_microbatches, depth)
    for one in {schedule, with_loss_stage(schedule)}:
        yield from (one, split(one))


def sizes() -> Iterator[tuple[str, int, int]]:
    for name in schedule_names():
        for depth in (1, 2, 3) if name in ("hanayo", "hanayo-zb", "interleaved", "interleaved-zb") else (1,):
            for num_ranks in range(2, 9):
                yield name, num_ranks, depth


def posted_together(row: Iterable[Action]) -> Iterator[list[Kind]]:
    """The kinds of the messages that a rank starts at once, in the order of the table."""
    for is_message, run in groupby(row, key=lambda action: action.kind.is_message):
        if is_message:
            yield [action.kind for action in run]


SMALL = [*((name, 2, 1) for name in schedule_names()), *(one for one in sizes() if one[1:] == (4, 2))]


@pytest.mark.parametrize(("name", "num_ranks", "depth"), covered(sizes(), by=SMALL))
def test_no_table_hangs(name: str, num_ranks: int, depth: int, request: pytest.FixtureRequest) -> None:
    counts: Iterable[int] = (1, num_ranks - 1, num_ranks + 1)
    if request.node.get_closest_marker("thorough") is not None:
        counts = range(1, 4 * num_ranks + 1) if depth == 1 else (*counts, 2 * num_ranks, 4 * num_ranks)
    for num_microbatches in counts:
        for schedule in variants(name, num_ranks, num_microbatches, depth):
            for parts in batches(schedule):
                assert hangs(*parts) == [], f"{schedule.name}, B = {num_microbatches}"


@given(schedules(max_ranks=4, max_microbatches=6))
@unhurried
def test_no_table_in_pairs_hangs(schedule: Schedule) -> None:
    """Hosts wait for the inputs of both before the first, and send what both made behind the second."""
    for parts in batches(schedule):
        assert hangs(*parts) == []


@pytest.mark.parametrize("name", schedule_names())
def test_hosts_post_messages_in_the_tables_order(name: str) -> None:
    """They start the sends between two computations before the receives: one at most, two behind a pair."""
    for schedule in variants(name, 4, 5, 1):
        for part in chain(*batches(schedule)):
            for kinds in chain(*map(posted_together, complete(part))):
                sends = [kind in (Kind.SEND_F, Kind.SEND_B) for kind in kinds]
                assert sends == sorted(sends, reverse=True), f"{schedule.name}: {kinds}"
                assert sum(sends) <= 1 + bool(part.pairs), f"{schedule.name}: {kinds}"


def reduced_together(*copies: Schedule) -> list[str]:
    """Where data ranks hang if their reductions hold up all hosts that take part, too."""
    rows: list[list[Item]] = []
    meets: dict[Item, list[Item]] = {}
    reductions: dict[int, list[Item]] = defaultdict(list)
    for number, copy in enumerate(copies):
        completed = complete(copy)
        rows += [[(number, action) for action in actions] for actions in completed]
        for receive, send in pairs(copy, completed):
            meets[number, receive], meets[number, send] = [(number, send)], [(number, receive)]
        for action in chain(*completed):
            if action.kind is Kind.REDUCE_GRAD:
                reductions[action.stage].append((number, action))
    meets |= {item: together for together in reductions.values() for item in together}
    return held_up(rows, meets)


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("num_ranks", covered([2, 4, 8], by=[4]))
def test_reductions_hold_up_nobody_for_good(name: str, num_ranks: int) -> None:
    """Nor do they if a data rank runs fewer micro-batches."""
    layout = choose(num_ranks=num_ranks, num_blocks=64, num_waves=1, schedule=name, num_microbatches=2 * num_ranks)
    whole = layout.table(2 * num_ranks)
    for num_microbatches in range(1, 2 * num_ranks + 1):
        assert reduced_together(whole, layout.table(num_microbatches)) == []


def test_messages_in_a_file_are_placed_anew(tmp_path: Path) -> None:
    """So a file whose receive comes before what its own send waits for trains all the same."""
    (tmp_path / "early.csv").write_text(
        "0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0\n1RECV_F0,1F0,2RECV_B0,2F0,2SEND_F0,2B0,1B0,1SEND_B0\n"
    )
    schedule = Schedule.from_csv(tmp_path / "early.csv")
    assert hangs(schedule) == []
    assert complete(schedule)[1] == row("1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 2REDUCE_GRAD 1B0 1SEND_B0 1REDUCE_GRAD")


def test_the_model_finds_a_receive_that_its_own_send_waits_for() -> None:
    """In a wave, P = 2: nobody makes the message of 2RECV_B0 before 2F0 has run."""
    rows = [row("0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0"), row("1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 1B0")]
    wave = table("0F0 3F0 3B0", "1F0 2F0 2B0 1B0", stage_ranks=(0, 1, 1, 0), num_microbatches=1)
    items = [[(0, action) for action in one] for one in rows]
    receives = {(0, receive): [(0, send)] for receive, send in pairs(wave, rows)}
    assert held_up(items, receives) == ["3RECV_F0", "2RECV_B0"]
    assert held_up(items, {}) == []
