"""Who waits for whom, as drawings: > is a wait, ! a rank that waits for nobody, x one that does not answer."""

import re
from dataclasses import asdict, replace

import pytest

from lightning_hanayo.strategy.waits import (
    MAX_LINES,
    Mismatch,
    Standstill,
    Status,
    Wait,
    circle_in,
    find_mismatch,
    named,
    report,
    summary,
)


def drawn(drawing: str) -> Standstill:
    """The waits of a drawing, as "0>1 1>2 2! 3x": a message for each arrow."""
    statuses, absent = {}, {}
    for rank, kind, peers in re.findall(r"(\d+)([>!x])([\d,]*)", drawing):
        if kind == "x":
            absent[int(rank)] = "is stopped (SIGSTOP)"
            continue
        ranks = tuple(int(peer) for peer in peers.split(",") if peer)
        wait = Wait(f"message {peers}", ranks) if kind == ">" else None
        statuses[int(rank)] = Status(int(rank), 0, 15.0, wait=wait, doing="is in hook, model.py:31")
    return Standstill(statuses, absent)


def in_collective(rank: int, ranks: tuple[int, ...], call: str = "all_reduce", number: int = 5) -> Status:
    return Status(rank, 0, 15.0, wait=Wait(call, ranks, "world", number, ranks, call), done={"world": number})


def receiving(rank: int, source: int, *, received: int = 3, sent: int = 0) -> Status:
    """Waits for the next message after those that it has received; has itself sent so many to each rank."""
    channel = f"{source}>{rank}"
    wait = Wait("a message", (source,), channel, received + 1, (source,))
    return Status(rank, 0, 15.0, wait=wait, done={f"{rank}>{other}": sent for other in range(4)})


def standing(*statuses: Status) -> Standstill:
    return Standstill({status.rank: status for status in statuses}, {})


def place(rank: int) -> str:
    return f"pipeline {rank}"


@pytest.mark.parametrize(
    ("drawing", "to_blame"),
    [
        ("0>1 1>2 2>3 3!", [3]),
        ("0>1 1>2 2! 3>2", [2]),
        ("0>1 1! 2>3 3!", [1, 3]),
        ("0! 1! 2!", [0, 1, 2]),
        ("0>1 1>2 2x", [2]),
        ("0>1 1! 2x", [1, 2]),
        ("0>1 1>0", [0, 1]),
        ("0>1 1>2 2>3 3>1", [1, 2, 3]),
        ("0>1,2 1>0 2!", [2]),
    ],
)
def test_the_ranks_that_wait_for_nobody_are_to_blame_or_a_circle(drawing: str, to_blame: list[int]) -> None:
    assert drawn(drawing).to_blame == to_blame


def test_ranks_in_one_collective_wait_for_those_outside() -> None:
    everyone = (0, 1, 2, 3)
    one_is_missing = standing(*(in_collective(rank, everyone) for rank in (0, 1, 3)), Status(2, 0, 15.0))
    assert one_is_missing.waits_for(0) == {2}
    assert one_is_missing.to_blame == [2]
    all_are_there = standing(*(in_collective(rank, everyone) for rank in everyone))
    assert all_are_there.waits_for(0) == frozenset()
    assert all_are_there.to_blame == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("edges", "circle"),
    [
        ({0: [1], 1: [2], 2: []}, []),
        ({0: [1], 1: [0]}, [0, 1]),
        ({0: [2], 1: [0], 2: [1]}, [0, 2, 1]),
        ({3: [0, 1], 1: [2], 2: [3], 0: []}, [1, 2, 3]),
        ({0: [1, 2], 1: [3], 2: [3], 3: []}, []),
    ],
)
def test_a_circle_of_waits_is_found(edges: dict[int, list[int]], circle: list[int]) -> None:
    assert circle_in(edges) == circle


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([1, 2], "ranks 1 and 2"),
        (range(4, 128), "ranks 4 to 127"),
        ([0, 2, 5, 6, 7], "ranks 0, 2 and 5 to 7"),
    ],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert named(ranks) == text


def test_the_report_names_the_line_and_who_waits_for_what() -> None:
    assert report(drawn("0>1 1>2 2!"), place) == [
        "  rank 2 (pipeline 2) waits for nobody: it is in hook, model.py:31",
        "  rank 0 (pipeline 0) waits for rank 1: message 1",
        "  rank 1 (pipeline 1) waits for rank 2: message 2",
    ]


def test_the_report_names_ranks_that_do_not_answer() -> None:
    assert report(drawn("0>1 1x"), place)[0] == "  rank 1 (pipeline 1) is stopped (SIGSTOP)"
    assert summary(drawn("0>1 1x"), place) == "rank 1 (pipeline 1) is stopped (SIGSTOP)"


@pytest.mark.parametrize(
    ("why", "text"), [("has ended", "have ended"), ("is outside", "are outside"), ("does not answer", "do not answer")]
)
def test_ranks_that_do_not_answer_share_a_line(why: str, text: str) -> None:
    assert report(Standstill({}, {0: why, 1: why}), place) == [f"  ranks 0 and 1 {text}"]


def test_ranks_that_all_compute_share_a_line() -> None:
    assert report(drawn("0! 1! 2!"), place) == ["  ranks 0 to 2 are in hook, model.py:31"]


def test_the_report_of_a_large_world_is_short() -> None:
    same = drawn("0! " + " ".join(f"{rank}>0" for rank in range(1, 128)))
    assert report(same, place)[1:] == ["  ranks 1 to 127 wait for rank 0: message 0"]
    chain = drawn("0! " + " ".join(f"{rank}>{rank - 1}" for rank in range(1, 128)))
    assert report(chain, place)[1:] == ["  ranks 1 to 127 wait for those, or for others that do"]
    many = drawn(" ".join(f"{rank}!" for rank in range(64)))
    different = Standstill({r: replace(s, doing=f"is in step {r}") for r, s in many.statuses.items()}, {})
    assert len(report(different, place)) <= MAX_LINES - 2


def test_a_circle_of_messages_that_nobody_has_sent_is_a_mismatch() -> None:
    """Each has sent three messages, and waits for the fourth."""
    both = standing(receiving(0, 1, sent=3), receiving(1, 0, sent=3))
    found = find_mismatch(both, both)
    assert found is not None
    assert found.ranks == (0, 1)


def test_a_collective_that_others_come_to_only_after_a_message_is_a_mismatch() -> None:
    """Rank 0 alone saves a checkpoint; rank 1 waits for its next batch."""
    saving = replace(in_collective(0, (0, 1)), done={"world": 5, "0>1": 3})
    waiting = replace(receiving(1, 0), done={"world": 4})
    assert find_mismatch(standing(saving, waiting), standing(saving, waiting)) == Mismatch(
        (0, 1), "each waits for what another of them can only do afterwards"
    )


def test_different_collectives_of_one_group_are_a_mismatch() -> None:
    both = standing(in_collective(0, (0, 1), "barrier"), in_collective(1, (0, 1), "all_reduce"))
    found = find_mismatch(both, both)
    assert found is not None
    assert "barrier and all_reduce" in found.why


SLOW = {
    "a message that is on its way": standing(receiving(0, 1, sent=3), receiving(1, 0, sent=4)),
    "messages that aren't counted": drawn("0>1 1>0"),
    "a rank that computes": standing(receiving(0, 1, sent=3), Status(1, 0, 15.0, done={"1>0": 3})),
    "one collective": standing(in_collective(0, (0, 1)), in_collective(1, (0, 1))),
    "the next collective, while the last one is still under way here": standing(
        in_collective(0, (0, 1), "barrier", 6), in_collective(1, (0, 1), "all_gather", 5)
    ),
    "a rank that doesn't answer": Standstill({0: receiving(0, 1, sent=3)}, {1: "is stopped (SIGSTOP)"}),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_may_still_end_is_no_mismatch(name: str) -> None:
    assert find_mismatch(SLOW[name], SLOW[name]) is None


def test_a_rank_that_has_moved_in_between_is_no_mismatch() -> None:
    now = standing(receiving(0, 1, sent=3), receiving(1, 0, sent=3))
    before = standing(replace(now.statuses[0], progress=-1), now.statuses[1])
    assert find_mismatch(before, now) is None
    assert find_mismatch(standing(now.statuses[0]), now) is None


def test_a_status_is_sent_as_plain_values() -> None:
    for status in (receiving(0, 1), in_collective(1, (0, 1)), Status(2, 7, 1.0)):
        assert Status.from_json(asdict(status)) == status
