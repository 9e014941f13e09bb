"""Finds in a stack what a rank waits for: a message, the other ranks of a collective, or nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType

import torch.distributed as dist

from lightning_hanayo.monitor.hangs.waits import Wait
from lightning_hanayo.runtime.comm import point_to_point, relay
from lightning_hanayo.runtime.comm.message import MessageKey
from lightning_hanayo.runtime.comm.process_group_transport import ProcessGroupTransport, ReportingWork, Transfer
from lightning_hanayo.runtime.comm.transport import Transport
from lightning_hanayo.strategy.hangs.stack import Stack, doing, is_library, name_of
from lightning_hanayo.strategy.user_code import raw_collectives
from lightning_hanayo.strategy.user_code.agreement import Agreement
from lightning_hanayo.topology import Topology

_TORCH = "torch.distributed.distributed_c10d"
_OURS = "lightning_hanayo."
WORLD = "collectives of all ranks"
"""the channel of the default process group"""
_MAKING_GROUPS = ("new_group", "split_group")
_MEETINGS = frozenset(
    ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single",
     "reduce_scatter", "reduce_scatter_tensor")
)  # fmt: skip
"""collectives that end on no rank before all ranks have come"""
_OWN_COLLECTIVES = {
    "runtime.autograd.gradient_all_reduce": ("finish", "the sum of gradients over the data ranks", "data x y z"),
    "tensor3d.mesh": ("wait", "a collective of its cube", "x y z"),
    "strategy.setup.initial_values": ("_build_and_distribute", "initial values from the ranks of its cube", "x y z"),
    "strategy.groups.factory": ("_make_connected", "the first collective of a group", "data pipe x y z"),
    "strategy.groups.channels": ("_send_once", "the first use of a channel", "pipe"),
}
"""by module: the function that waits, what for, and the axes along which the others are"""
_RELAYED = {
    "batch": "how the next batch is cut",
    "data": "whether there is one more batch",
    "metrics": "what was logged",
    "loss": "the loss of the batch",
    "norm": "that all compute a norm",
    "vote": "a decision of user code",
    "values": "what steps have left for hooks",
    "pass": "the next pass through the stack",
}
"""the kinds of messages of the relay"""


@dataclass(frozen=True)
class WaitFinder:
    """Finds out what one rank waits for."""

    rank: int
    topology: Topology

    def find(self, stack: Stack) -> Wait | None:
        """What a stack waits for; None if it runs user code, or computes."""
        stack = [frame for frame in stack if name_of(frame)[0] != raw_collectives.__name__]
        for i, frame in enumerate(stack):
            if not is_library(frame):
                return None
            module, function = name_of(frame)
            if frame.f_code is ReportingWork.wait.__code__:
                return self._message(frame.f_locals["self"].transfer, stack[i:])
            if module == _TORCH:
                return _collective(stack[i:])
            if frame.f_code is Agreement.on.__code__:
                return _agreement(frame)
            if (own := _OWN_COLLECTIVES.get(module.removeprefix(_OURS))) and own[0] == function:
                ranks = self.topology.group_of(self.rank, *own[2].split())
                return Wait(own[1], ranks, channel=f"{own[1]} {ranks[0]}")
        return None

    def _message(self, transfer: Transfer, stack: Stack) -> Wait:
        """The wait for a message; or, of its sender, until it is taken."""
        what = "that it takes an earlier message" if transfer.sends else _message_name(stack)
        channel = _channel(self.rank, transfer, counts_own=False)
        return Wait(what, (transfer.peer,), channel, transfer.number, (transfer.peer,))


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


def _message_name(stack: Stack) -> str:
    for frame in stack:
        module, function = name_of(frame)
        if (module, function) == (point_to_point.__name__, "wait_receive"):
            return _in_words(frame.f_locals["key"])
        if (module, function) == (relay.__name__, "broadcast"):
            return _RELAYED[frame.f_locals["kind"]]
    return "a message"


def _in_words(key: MessageKey) -> str:
    value = "activation of stage" if key.direction == "forward" else "gradient for the output of stage"
    return f"the {value} {key.stage}, micro-batch {key.microbatch}"


def _collective(stack: Stack) -> Wait | None:
    """The collective of torch.distributed that a stack is in. None if the process group is gone."""
    torchs = list(takewhile(lambda frame: name_of(frame)[0].startswith("torch.distributed."), stack))
    outer, call = [frame for frame in torchs if name_of(frame)[0] == _TORCH][-1], stack[0].f_code.co_name
    name, world = outer.f_code.co_name, dist.group.WORLD
    if world is None:
        return None
    if name in _MAKING_GROUPS:
        ranks = tuple(outer.f_locals.get("ranks") or dist.get_process_group_ranks(world))
        return Wait("the making of a process group", ranks, channel=f"new group {ranks}")
    group = stack[0].f_locals.get("group") or world
    ranks = tuple(dist.get_process_group_ranks(group))
    place = doing(stack[len(torchs) :])[0].removeprefix("is ")
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


def _agreement(frame: FrameType) -> Wait:
    """The wait of user code for the other ranks that shall call the same collective."""
    agreement: Agreement = frame.f_locals["self"]
    return Wait(str(frame.f_locals["call"]), tuple(agreement.ranks), channel=f"{agreement.name} {agreement.ranks[0]}")
