"""Completeness: does a table's own communication carry every message once, in an order that brings it to its end?

    rank 0   0F0 0SEND_F0 0RECV_B0 0B0              every message: sent by its producer's rank after the producer,
    rank 1   1RECV_F0 1F0 1B0 1SEND_B0              received by its consumer's rank before the consumer

Two ranks match their messages by order alone (NCCL), so a rank receives from another in the order of its sends.
"""

from collections import defaultdict
from typing import NoReturn

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.dependency import Lists, play, waits_in
from lightning_hanayo.schedule.passes.communication import complete
from lightning_hanayo.schedule.table import Schedule
from lightning_hanayo.schedule.text.table_text import grid

Places = dict[Action, tuple[int, int]]


def check_communication(schedule: Schedule, lists: Lists) -> None:
    """Accept `lists`, the compute of the valid `schedule` with all of its communication, or with none.

    Raises:
        HanayoError: a message is missing, superfluous or misplaced; the message draws the table and marks the culprit.
    """
    found = _places(schedule, lists)
    if not any(action.kind.is_message for action in found):
        return
    expected = {a: rank for rank, row in enumerate(complete(schedule)) for a in row if a.kind.is_message}
    for action, (rank, place) in found.items():
        if action.kind.is_message and expected.get(action) != rank:
            belongs = f"it belongs on rank {expected[action]}" if action in expected else "nobody needs that message"
            _refuse(schedule, lists, (rank, place), f"{action} doesn't belong here: {belongs}")
    waits = waits_in(lists, schedule.num_stages, schedule.num_microbatches, schedule.num_chains)
    for action, rank in expected.items():
        if action not in found:
            here = next(found[other] for other in waits if _belongs(action, other))
            _refuse(schedule, lists, here, f"{action} is missing on rank {rank}")
    _check_places(schedule, lists, found, waits)
    _check_pairs(schedule, lists, found)
    done = set(play(lists, waits))
    for rank, row in enumerate(lists):
        for place, action in enumerate(row):
            if action not in done:
                _refuse(schedule, lists, (rank, place), f"{action} waits for something that waits for it")


def _places(schedule: Schedule, lists: Lists) -> Places:
    found: Places = {}
    for rank, row in enumerate(lists):
        for place, action in enumerate(row):
            if action in found and not action.kind.is_compute:
                _refuse(schedule, lists, (rank, place), f"{action} stands twice, first on rank {found[action][0]}")
            found[action] = (rank, place)
    return found


def _belongs(message: Action, action: Action) -> bool:
    """Whether `action` makes what `message` sends, or works on what it receives."""
    kinds = (Kind.F,) if message.kind in (Kind.SEND_F, Kind.RECV_F) else (Kind.B, Kind.I)
    return (action.stage, action.microbatch) == (message.stage, message.microbatch) and action.kind in kinds


def _check_places(schedule: Schedule, lists: Lists, found: Places, waits: dict[Action, tuple[Action, ...]]) -> None:
    """On one rank, whatever waits for something stands behind it."""
    for action, others in waits.items():
        rank, place = found[action]
        for other in others:
            if found[other][0] == rank and found[other][1] > place:
                _refuse(schedule, lists, (rank, place), f"{action} stands before {other}, which it needs")


def _check_pairs(schedule: Schedule, lists: Lists, found: Places) -> None:
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, row in enumerate(lists):
        for action in row:
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                receive = _received(action)
                sends[rank, found[receive][0]].append(receive)
    for (sender, rank), receives in sends.items():
        places = [found[receive][1] for receive in receives]
        late = next((i for i in range(1, len(places)) if places[i] < places[i - 1]), None)
        if late is not None:
            why = (
                f"{receives[late]} comes before {receives[late - 1]}, but rank {sender} sends them the other way round"
            )
            _refuse(schedule, lists, (rank, places[late]), why)


def _received(send: Action) -> Action:
    if send.kind is Kind.SEND_F:
        return Action(send.stage + 1, Kind.RECV_F, send.microbatch)
    return Action(send.stage - 1, Kind.RECV_B, send.microbatch)


def _refuse(schedule: Schedule, lists: Lists, here: tuple[int, int], why: str) -> NoReturn:
    drawn = grid(lists, here)
    error = HanayoError(f"schedule {schedule.name!r}, rank {here[0]}, place {here[1]}: {why}\n{drawn}")
    error.cell = here
    raise error
