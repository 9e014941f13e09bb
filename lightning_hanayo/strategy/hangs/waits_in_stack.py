"""Finds out what this rank waits for: a message, the other ranks of a collective, or nothing.

Our own code states its waits (`monitor/hangs/waiting.py`). Calls of torch.distributed are found in the stack.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from types import FrameType

import torch.distributed as dist

from lightning_hanayo.monitor.hangs.waiting import Waiting, stated
from lightning_hanayo.monitor.hangs.waits import Wait
from lightning_hanayo.runtime.comm.process_group_transport import ProcessGroupTransport, Transfer
from lightning_hanayo.runtime.comm.transport import Transport
from lightning_hanayo.strategy.hangs.stack import Stack, doing, is_library, name_of
from lightning_hanayo.strategy.user_code import raw_collectives
from lightning_hanayo.strategy.user_code.agreement import Agreement

_TORCH = dist.distributed_c10d.__name__
WORLD = "collectives of all ranks"
"""the channel of the default process group"""
_MAKING_GROUPS = ("new_group", "split_group")
_MEETINGS = frozenset(
    ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single",
     "reduce_scatter", "reduce_scatter_tensor")
)  # fmt: skip
"""collectives that end on no rank before all ranks have come"""


def find_wait(rank: int, stack: Stack) -> Wait | None:
    """What the rank with this stack waits for; None if it runs user code, or computes."""
    if (own := stated(stack.threads)) is not None:
        return _stated(rank, own)
    frames = [frame for frame in stack.frames if name_of(frame)[0] != raw_collectives.__name__]
    for i, frame in enumerate(frames):
        if not is_library(frame):
            return None
        if name_of(frame)[0] == _TORCH:
            return _collective(frames[i:])
    other = stated()  # while it waits for its turn, the other action of a pair may wait for a collective
    return None if other is None else _stated(rank, other)


def _stated(rank: int, wait: Waiting) -> Wait | None:
    what, whom = wait.what, wait.whom
    if isinstance(whom, Transfer):
        received = "a message" if wait.outer is None else wait.outer.what
        what = "that it takes an earlier message" if whom.sends else received
        channel = _channel(rank, whom, counts_own=False)
        return Wait(str(what), (whom.peer,), channel, whom.number, (whom.peer,))
    if isinstance(whom, Agreement):
        return Wait(str(what), tuple(whom.ranks), channel=f"{whom.name} {whom.ranks[0]}")
    if isinstance(whom, tuple):
        return Wait(str(what), whom, channel=f"{what} {whom}")
    return None  # between two transfers


def operations_done(rank: int, transports: Iterable[Transport]) -> dict[str, int]:
    """How many operations a rank has started on each channel: messages, and collectives of the whole world."""
    done = {
        _channel(rank, transfer, counts_own=True): transfer.number
        for transport in transports
        if isinstance(transport, ProcessGroupTransport)
        for transfer in transport.started
    }
    if (number := _world_number()) is not None:
        done[WORLD] = number
    return done


def _channel(rank: int, transfer: Transfer, *, counts_own: bool) -> str:
    """Names the channel on which the rank's own transfers are counted, or those of its peer that belong to them."""
    sender, receiver = (rank, transfer.peer) if transfer.sends else (transfer.peer, rank)
    counted = "sent" if transfer.sends == counts_own else "received"
    return f"{counted} {sender}>{receiver}, tag {transfer.tag} among {transfer.num_ranks}"


def _collective(frames: Sequence[FrameType]) -> Wait | None:
    """The collective of torch.distributed that these frames are in. None if the process group is gone."""
    torchs = list(takewhile(lambda frame: name_of(frame)[0].startswith("torch.distributed."), frames))
    outer, call = [frame for frame in torchs if name_of(frame)[0] == _TORCH][-1], frames[0].f_code.co_name
    name, world = outer.f_code.co_name, dist.group.WORLD
    if world is None:
        return None
    if name in _MAKING_GROUPS:
        ranks = tuple(outer.f_locals.get("ranks") or dist.get_process_group_ranks(world))
        return Wait("the making of a process group", ranks, channel=f"new group {ranks}")
    group = frames[0].f_locals.get("group") or world
    ranks = tuple(dist.get_process_group_ranks(group))
    place = doing(frames[len(torchs) :])[0].removeprefix("is ")
    what = f"{name} ({place})"
    if group is not world:
        return Wait(what, ranks, channel=group.group_name)
    return Wait(what, ranks, WORLD, _world_number() or 0, ranks if call in _MEETINGS else (), call)


def _world_number() -> int | None:
    """How many collectives this rank has started over gloo's world. Point-to-point messages have groups of their own.

    A host doesn't wait in collectives of other backends, so there the number says nothing.
    """
    world = dist.group.WORLD
    if world is None or dist.get_backend(world) != "gloo":
        return None
    return int(world._get_sequence_number_for_group())  # type: ignore[attr-defined]
