"""The program: the keys of each action's messages.

rank 0   0F0 0F1 3F0 3I0 3W0 ...      stages 0 and 3
rank 1       1F0 2F0 1F1 2I0 ...      stages 1 and 2: between them nothing is sent
"""

import pytest

from lightning_hanayo.pipeline_parallel.engine import Compute, Program
from lightning_hanayo.pipeline_parallel.p2p import MessageKey
from lightning_hanayo.schedule import Schedule, build
from tests.schedule.samples import split


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
