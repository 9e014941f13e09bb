"""The program: the keys of each action's messages, and when the buffer of a sent message is free.

rank 0   0F0 0F1 3F0 3I0 3W0 ...      stages 0 and 3
rank 1       1F0 2F0 1F1 2I0 ...      stages 1 and 2: between them nothing is sent
"""

from itertools import chain

import pytest
from hypothesis import given

from lightning_hanayo.runtime.comm.point_to_point import MessageKey
from lightning_hanayo.runtime.program import Communicate, Compute, Program
from lightning_hanayo.schedule import Action, Kind, Schedule, build
from tests.schedule.samples import schedules, split, unhurried


def computes(schedule: Schedule, rank: int) -> dict[str, Compute]:
    return {str(step.action): step for step in Program.from_schedule(schedule, rank).steps if isinstance(step, Compute)}


def forward(stage: int, microbatch: int) -> MessageKey:
    return MessageKey(stage, "forward", microbatch)


def backward(stage: int, microbatch: int) -> MessageKey:
    return MessageKey(stage, "backward", microbatch)


WAVE = split(build("hanayo", num_ranks=2, num_microbatches=2))
MESSAGES = [  # action -> the message it needs, the one it makes, whether the first is local
    ("0F1", None, forward(0, 1), False),
    ("1F1", forward(0, 1), forward(1, 1), False),
    ("2F1", forward(1, 1), forward(2, 1), True),
    ("3F1", forward(2, 1), None, False),
    ("3I1", None, backward(2, 1), False),
    ("1I1", backward(1, 1), backward(0, 1), True),
    ("0I1", backward(0, 1), None, False),
    ("1W1", None, None, False),
]


@pytest.mark.parametrize(("action", "input_key", "output_key", "is_local"), MESSAGES)
def test_messages(action: str, input_key: MessageKey | None, output_key: MessageKey | None, is_local: bool) -> None:
    step = computes(WAVE, WAVE.stage_ranks[int(action[0])])[action]
    assert (step.input_key, step.output_key, step.is_local) == (input_key, output_key, is_local)


def test_each_copy_of_the_model_has_its_own_ends() -> None:
    """Chimera, P = 2: stages 0, 1 and their copies 2, 3."""
    schedule = build("chimera", num_ranks=2, num_microbatches=2)
    steps = computes(schedule, 0) | computes(schedule, 1)
    ends = [str(step.action) for step in steps.values() if step.action.kind is Kind.F and step.output_key is None]
    starts = [str(step.action) for step in steps.values() if step.action.kind is Kind.F and step.input_key is None]
    assert {(end[0]) for end in ends} == {"1", "3"} and {(start[0]) for start in starts} == {"0", "2"}


def test_a_received_message_completes_earlier_sends_to_its_sender() -> None:
    """rank 0   0F0 0F1     0B0 0F2 0B1     0B2
    rank 1       1F0 1B0 1F1 1B1     1F2 1B2
    """
    schedule = build("1f1b", num_ranks=2, num_microbatches=3)
    steps = computes(schedule, 0)
    assert [(name, step.completed_sends) for name, step in steps.items() if step.completed_sends] == [
        ("0B0", (forward(0, 0),)), ("0B1", (forward(0, 1),)), ("0B2", (forward(0, 2),)),
    ]  # fmt: skip
    assert [(name, step.completed_sends) for name, step in computes(schedule, 1).items() if step.completed_sends] == [
        ("1F2", (backward(0, 0),)),
    ]  # fmt: skip


@unhurried
@given(schedules(max_ranks=4, max_microbatches=5))
def test_no_send_is_complete_before_its_receiver_has_run(schedule: Schedule) -> None:
    """Each send completes at most once, and only by a message that its receiver made later."""
    place = {action: (rank, i) for rank, row in enumerate(schedule.actions) for i, action in enumerate(row)}

    def action(stage: int, key: MessageKey) -> Action:
        kinds = (Kind.F,) if key.direction == "forward" else (Kind.B, Kind.I)
        return next(a for kind in kinds if (a := Action(stage, kind, key.microbatch)) in place)

    for rank in range(schedule.num_ranks):
        program = Program.from_schedule(schedule, rank)
        sent = [key for step in program.steps if isinstance(step, Communicate) for key, _ in step.sends]
        freed = list(chain(*(step.completed_sends for step in program.steps if isinstance(step, Compute))))
        assert len(set(freed)) == len(freed) and set(freed) <= set(sent)
        for step in (m for m in program.steps if isinstance(m, Compute) and m.completed_sends):
            assert step.input_key is not None and not step.is_local
            toward = step.input_key.direction == "forward"
            maker = place[action(step.input_key.stage + (not toward), step.input_key)]
            for key in step.completed_sends:
                taker = place[action(key.stage + (key.direction == "forward"), key)]
                assert taker[0] == maker[0] != rank and taker <= maker
