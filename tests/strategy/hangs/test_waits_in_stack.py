"""What a rank waits for, read from its stack until it is found; then the other rank comes, too."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import torch
import torch.distributed as dist

from lightning_hanayo.monitor.waiting import stated
from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce
from lightning_hanayo.pipeline_parallel.p2p import Message, MessageKey, PointToPointChannel
from lightning_hanayo.pipeline_parallel.transport import MEANINGS, MessageKind, ProcessGroupTransport, Relay
from lightning_hanayo.strategy import hangs
from lightning_hanayo.strategy.hangs import WORLD, find_wait, operations_done, read_stack
from lightning_hanayo.strategy.user_code.collectives import Agreement, Call
from lightning_hanayo.strategy.waits import Wait
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis
from tests.harness.pool import Pool

KEY = MessageKey(1, "backward", 3)
MESSAGE = Message(("tuple", ("tensor", 0)), (torch.ones(2),))
SENT = "sent 1>0, tag {} among 2"


def _fail(error: Exception) -> None:
    raise error


class Ranks:
    """Two ranks, of which one runs each function first, and is looked at until it waits."""

    def __init__(self, waits: int = 0) -> None:
        self.waits = waits
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.store = dist.distributed_c10d._get_default_store().clone()  # one that is waiting answers no other thread
        self.others = dist.new_group([0, 1])
        self.transport = ProcessGroupTransport(
            [0, 1],
            control=self.others,
            channels={},
            device=torch.device("cpu"),
            on_failure=_fail,  # type: ignore[arg-type]
        )
        self.count = 0

    def wait(self, function: Callable[[], Any]) -> Wait | None:
        """What the one rank waits for in the function; None on the other, which notes what it has done until then."""
        self.count += 1
        key = f"found {self.count}"
        if self.rank != self.waits:
            self.store.wait([key])
            self.store.set(f"done {self.count}", str(operations_done(self.rank, [self.transport])))
            function()
            return None
        found: list[Wait] = []
        looking = threading.Thread(target=self._look, args=(threading.get_ident(), found, key))
        looking.start()
        function()
        looking.join()
        return found[0]

    def done(self) -> dict[str, int]:
        """What the other rank had done when this one waited the last time."""
        done: dict[str, int] = eval(self.store.get(f"done {self.count}"))
        return done

    def _look(self, thread: int, found: list[Wait], key: str) -> None:
        while not found:
            time.sleep(0.01)
            if (wait := find_wait(self.rank, read_stack(thread))) is not None:
                found.append(wait)
        self.store.set(key, "")


def waits_in_collectives() -> list[Wait | None]:
    ranks, group, objects = Ranks(), dist.new_group([0, 1]), [None, None]
    calls: list[Callable[[], Any]] = [
        dist.barrier,
        lambda: dist.all_gather_object(objects, "a"),
        lambda: dist.broadcast(torch.ones(2), 1),
        lambda: dist.all_reduce(torch.ones(2), group=group),
        lambda: dist.new_group([0, 1], backend="gloo"),
    ]
    return [ranks.wait(call) for call in calls]


def test_collectives_are_waits_for_their_ranks(pool: Pool) -> None:
    found = pool.run(2, waits_in_collectives)[0]
    world, group, making = found[:3], found[3], found[4]
    assert [wait.what.partition(" (")[0] for wait in found] == [
        "barrier", "all_gather_object", "broadcast", "all_reduce", "the making of a process group",
    ]  # fmt: skip
    assert all(wait.ranks == (0, 1) for wait in found)
    assert [(wait.channel, wait.needs, wait.call) for wait in world] == [
        (WORLD, (0, 1), "barrier"), (WORLD, (0, 1), "all_gather"), (WORLD, (), "broadcast"),
    ]  # fmt: skip
    assert [wait.number for wait in world] == sorted({wait.number for wait in world})
    assert group.number == making.number == 0
    assert len({WORLD, group.channel, making.channel}) == 3


def waits_for_messages() -> list[tuple[Wait | None, int]]:
    ranks = Ranks()
    channel = PointToPointChannel(ranks.transport)
    found: list[tuple[Wait | None, int]] = []
    for _ in range(2):
        channel.begin_batch(0)
        if ranks.rank == 0:
            channel.start_transfers([], [(KEY, 1)])
            wait = ranks.wait(lambda: channel.wait_receive(KEY))
            found.append((wait, ranks.done().get(SENT.format(KEY.tag), 0)))
        else:
            ranks.wait(lambda: channel.start_transfers([(KEY, 0, MESSAGE)], []))
            channel.finish()
    dist.barrier()
    return found


def test_messages_are_waits_for_their_senders(pool: Pool) -> None:
    (first, sent_before_first), (second, sent_before_second) = pool.run(2, waits_for_messages)[0]
    text = "the gradient for the output of stage 1, micro-batch 3"
    assert (first.what, first.ranks, first.needs, first.number) == (text, (1,), (1,), 1)
    assert (second.what, second.number) == (text, 2)
    assert (sent_before_first, sent_before_second) == (0, 1)
    assert first.channel == second.channel == SENT.format(KEY.tag)


def waits_in_our_collectives() -> list[Wait | None]:
    ranks = Ranks()
    cube = Mesh.create((1, 2, 1)).axis("y")
    rows = MeshAxis(dist.group.WORLD, 2, ranks.rank, what="rows of a sharded optimizer")
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    reduction = GradientAllReduce({0: [weight]}, ranks.others)
    failures = SimpleNamespace(run=0, rank=ranks.rank, store=ranks.store.clone(), position=(), positions=dict)
    failures.check_peers = lambda: None
    agreement = Agreement("calls", [0, 1], failures)  # type: ignore[arg-type]

    def reduce_gradients() -> None:
        reduction.start(0)
        reduction.finish()

    calls: list[Callable[[], Any]] = [
        lambda: cube.all_gather(torch.ones(2)).wait(),
        lambda: rows.all_reduce(torch.ones(2)).wait(),
        reduce_gradients,
        lambda: agreement.on(Call("barrier", "training_step")),
    ]
    found = [ranks.wait(call) for call in calls]
    assert stated() is None
    dist.barrier()
    return found


def test_our_collectives_are_waits_for_their_ranks(pool: Pool) -> None:
    found = pool.run(2, waits_in_our_collectives)[0]
    assert [(wait.what, wait.ranks) for wait in found] == [
        ("a collective of its cube", (0, 1)),
        ("rows of a sharded optimizer", (0, 1)),
        ("the sum of gradients over the data ranks", (0, 1)),
        ("barrier in training_step", (0, 1)),
    ]
    assert len({wait.channel for wait in found}) == 4


def test_all_kinds_of_messages_have_a_meaning() -> None:
    assert set(MEANINGS) == set(get_args(MessageKind))


def test_the_functions_of_torch_that_are_known_by_name_exist() -> None:
    names = hangs._MAKING_GROUPS + tuple(hangs._MEETINGS)
    assert all(callable(getattr(dist.distributed_c10d, name)) for name in names)


def wait_for_relay() -> Wait | None:
    ranks = Ranks(waits=1)
    relay = Relay(ranks.transport)
    found = ranks.wait(lambda: relay.broadcast("vote"))
    relay.finish()
    dist.barrier()
    return found


def test_what_the_relay_sends_is_named(pool: Pool) -> None:
    found = pool.run(2, wait_for_relay)[1]
    assert (found.what, found.ranks, found.number) == ("a decision of user code", (0,), 1)
