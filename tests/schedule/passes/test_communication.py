"""The communication pass: where sends, receives and reductions are placed, and that the result can't deadlock.

P = 2, stage 0 on rank 0, stage 1 on rank 1

rank 0   0F0 0SEND_F0           0F1 0SEND_F1                              0RECV_B0  0B0 ...
rank 1            1RECV_F0               1RECV_F1  1F0  1B0 1SEND_B0                1F1 ...
                                                   runs while 0F1 ends
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given

from lightning_hanayo.schedule import Action, CostModel, Kind, Schedule, build, complete, forward_only, simulate
from lightning_hanayo.schedule.communication import message_pairs
from tests.harness.thorough import covered
from tests.schedule.message_rule import executable_order, waits_in
from tests.schedule.samples import NAMES, make, row, schedules, table, unhurried

RECEIVES = (Kind.RECV_F, Kind.RECV_B)
SENDS = (Kind.SEND_F, Kind.SEND_B)


def other_rank(schedule: Schedule, action: Action) -> int:
    """The rank at the other end of a message."""
    later = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return schedule.stage_ranks[action.stage + (1 if later else -1)]


def without_messages(actions: Iterable[Action]) -> tuple[Action, ...]:
    return tuple(action for action in actions if not action.kind.is_message)


def test_the_drawing() -> None:
    schedule = table("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", stage_ranks=(0, 1), num_microbatches=2)
    assert complete(schedule) == (
        row("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD"),
        row("1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD"),
    )


def test_there_is_no_message_within_a_rank() -> None:
    completed = complete(build("hanayo", num_ranks=1, num_microbatches=2, num_waves=2))
    assert {action.kind for action in completed[0]} == {Kind.F, Kind.B, Kind.REDUCE_GRAD}
    turning = complete(build("hanayo", num_ranks=2, num_microbatches=2))
    assert not [a for actions in turning for a in actions if str(a).startswith(("1SEND_F", "2RECV_F", "2SEND_B"))]


@given(schedules())
@unhurried
def test_compute_stays_and_every_message_has_two_ends(schedule: Schedule) -> None:
    completed = complete(schedule)
    assert tuple(tuple(a for a in actions if a.kind.is_compute) for actions in completed) == schedule.actions
    everything = [action for actions in completed for action in actions]
    assert len(everything) == len(set(everything))
    sends = {(other_rank(schedule, a), a.microbatch, a.stage, a.kind) for a in everything if a.kind in SENDS}
    step = {Kind.RECV_F: (-1, Kind.SEND_F), Kind.RECV_B: (1, Kind.SEND_B)}
    receives = {
        (schedule.stage_ranks[a.stage], a.microbatch, a.stage + step[a.kind][0], step[a.kind][1])
        for a in everything
        if a.kind in RECEIVES
    }
    assert sends == receives


@given(schedules(pairs=False))
@unhurried
def test_a_send_comes_right_after_its_compute(schedule: Schedule) -> None:
    for actions in complete(schedule):
        for before, send in pairwise(actions):
            if send.kind in SENDS:
                made_by = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.I)
                assert (before.stage, before.microbatch) == (send.stage, send.microbatch)
                assert before.kind in made_by


@given(schedules())
@unhurried
def test_nothing_comes_between_the_actions_of_a_pair(schedule: Schedule) -> None:
    rows = complete(schedule)
    neighbours = {pair for cells in rows for pair in pairwise(cells)}
    assert schedule.pairs <= neighbours
    for cells in rows:
        place = {action: number for number, action in enumerate(cells)}
        for first, second in schedule.pairs:
            for action in (first, second) if first in place else ():
                forward = action.kind is Kind.F
                receive, send = (Kind.RECV_F, Kind.SEND_F) if forward else (Kind.RECV_B, Kind.SEND_B)
                assert place.get(Action(action.stage, receive, action.microbatch), -1) < place[first]
                assert place.get(Action(action.stage, send, action.microbatch), len(cells)) > place[second]


def test_a_gradient_that_is_whole_in_a_pair_is_reduced_behind_it() -> None:
    schedule = table("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", stage_ranks=(0, 0), num_microbatches=2)
    first, second = row("1B1 0B0")
    schedule = replace(schedule, pairs=frozenset({(first, second)}))
    assert complete(schedule) == (row("0F0 0F1 1F0 1F1 1B0 1B1 0B0 1REDUCE_GRAD 0B1 0REDUCE_GRAD"),)


@given(schedules())
@unhurried
def test_a_receive_comes_before_its_consumer(schedule: Schedule) -> None:
    for actions in complete(schedule):
        place = {action: number for number, action in enumerate(actions)}
        for receive in (action for action in actions if action.kind in RECEIVES):
            kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
            (consumer,) = (
                action for kind in kinds if (action := Action(receive.stage, kind, receive.microbatch)) in place
            )
            assert place[receive] < place[consumer]


def run_with_hops(schedule: Schedule, hop: float) -> float:
    """How long the table takes if a transfer waits for its send, and for what its receiver has begun before."""
    completed, costs = complete(schedule), CostModel()
    waits = waits_in(completed, schedule.num_stages, schedule.num_microbatches)
    begun_before: dict[Action, Action | None] = {}
    for actions in completed:
        latest = None
        for action in actions:
            begun_before[action] = latest
            latest = action if action.kind.is_compute else latest
    done: dict[Action | None, float] = {None: 0.0}
    for action in executable_order(completed, waits):
        ready = max((done[other] for other in waits[action]), default=0.0)
        if action.kind.is_compute or action.kind in RECEIVES:
            takes = hop if action.kind in RECEIVES else costs.of(schedule, action)
            ready = max(ready, done[begun_before[action]]) + takes
        done[action] = ready
    return max(done.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), covered([(2, 3), (4, 4), (4, 8), (8, 9)], by=[(4, 8)]))
def test_receives_are_posted_early_enough(name: str, num_ranks: int, num_microbatches: int) -> None:
    """The table takes as long as in the simulation, in which a transfer waits for nothing but its send."""
    schedule = make(name, num_ranks, num_microbatches, 2)
    simulated = simulate(schedule, CostModel(message=0.05)).makespan
    assert run_with_hops(schedule, 0.05) == pytest.approx(simulated)


@given(schedules())
@unhurried
def test_each_pair_of_ranks_receives_in_the_order_of_sending(schedule: Schedule) -> None:
    completed = complete(schedule)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(completed):
        for action in actions:
            if action.kind in SENDS:
                peer_stage = action.stage + (1 if action.kind is Kind.SEND_F else -1)
                sent[rank, other_rank(schedule, action)].append((peer_stage, action.kind[-1], action.microbatch))
            elif action.kind in RECEIVES:
                received[other_rank(schedule, action), rank].append((action.stage, action.kind[-1], action.microbatch))
    assert sent == received


@given(schedules())
@unhurried
def test_a_completed_table_never_hangs(schedule: Schedule) -> None:
    """Sends and receives don't block, a compute action waits for its own receive: then every action runs."""
    for one in (schedule, forward_only(schedule)):
        completed = complete(one)
        waits = waits_in(completed, one.num_stages, one.num_microbatches)
        assert sum(1 for _ in executable_order(completed, waits)) == sum(map(len, completed))


@given(schedules())
@unhurried
def test_messages_matched_by_order_alone_never_hang(schedule: Schedule) -> None:
    """The same with one channel per ordered pair of ranks, which matches messages by their order alone."""
    completed = complete(schedule)
    channels: dict[tuple[int, int], list[Action]] = defaultdict(list)
    posted: dict[tuple[int, int], list[Action]] = defaultdict(list)
    here: list[set[Action]] = [set() for _ in completed]
    place = [0] * len(completed)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(completed):
            while place[rank] < len(actions):
                action = actions[place[rank]]
                for pair, waiting in posted.items():
                    while pair[1] == rank and waiting and channels[pair]:
                        channels[pair].pop(0)
                        here[rank].add(waiting.pop(0))
                needs = Action(action.stage, Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B, action.microbatch)
                if action.kind in (Kind.F, Kind.B, Kind.I) and needs in actions and needs not in here[rank]:
                    break
                if action.kind in SENDS:
                    channels[rank, other_rank(schedule, action)].append(action)
                elif action.kind in RECEIVES:
                    posted[other_rank(schedule, action), rank].append(action)
                place[rank] += 1
                moved = True
    assert place == [len(actions) for actions in completed]


@given(schedules())
@unhurried
def test_gradients_are_reduced_right_after_the_last_of_them(schedule: Schedule) -> None:
    for rank, actions in enumerate(complete(schedule)):
        reduced = [action.stage for action in actions if action.kind is Kind.REDUCE_GRAD]
        assert sorted(reduced) == list(schedule.stages_of(rank))
        for stage in reduced:
            place = actions.index(Action(stage, Kind.REDUCE_GRAD, None))
            last = max(i for i, a in enumerate(actions) if a.stage == stage and a.kind in (Kind.B, Kind.W))
            assert last < place
            between = [a for a in actions[last + 1 : place] if a.kind.is_compute]
            assert between in ([], [schedule.partner_of.get(actions[last])])


def test_forward_only_reduces_nothing() -> None:
    completed = complete(forward_only(build("1f1b", num_ranks=2, num_microbatches=2)))
    assert completed[0] == row("0F0 0SEND_F0 0F1 0SEND_F1")


def test_sends_and_receives_between_two_neighbours_are_posted_together() -> None:
    """In the steady part of 1f1b a rank sends to a neighbour and receives from it in one call."""
    middle = complete(build("1f1b", num_ranks=3, num_microbatches=8))[1]
    runs = [list(run) for message, run in groupby(middle, key=lambda action: action.kind.is_message) if message]
    assert sum(len(run) >= 2 for run in runs) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_message_pairs_are_those_of_the_table(name: str) -> None:
    schedule = make(name, 4, 8)
    ranks = schedule.stage_ranks
    sent = {(ranks[a.stage], other_rank(schedule, a)) for row in complete(schedule) for a in row if a.kind in SENDS}
    assert message_pairs(schedule) == sent


@pytest.mark.parametrize("num_waves", [1, 2, 3])
def test_a_wave_sends_to_neighbours_only(num_waves: int) -> None:
    """It sends 4W(P-1) messages per micro-batch, forward and backward."""
    schedule = build("hanayo", num_ranks=4, num_microbatches=4, num_waves=num_waves)
    sends = [(rank, a) for rank, actions in enumerate(complete(schedule)) for a in actions if a.kind in SENDS]
    assert {abs(rank - other_rank(schedule, action)) for rank, action in sends} == {1}
    assert len(sends) == 4 * 4 * num_waves * 3
