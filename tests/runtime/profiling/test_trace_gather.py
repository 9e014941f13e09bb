"""Traces come to rank 0 whole, and nobody waits for them."""

from lightning_hanayo.runtime.comm.loopback import Hub
from lightning_hanayo.runtime.profiling.trace_gather import TraceGather, num_microbatches, pack, unpack
from lightning_hanayo.schedule import CostModel, Schedule, build, with_loss_stage
from tests.harness.limits import real_seconds
from tests.runtime.played import played


def table(num_microbatches: int) -> Schedule:
    return with_loss_stage(build("zb-h1", num_ranks=3, num_microbatches=num_microbatches))


def collections() -> list[TraceGather]:
    return [TraceGather(transport, table) for transport in Hub(3, timeout=real_seconds(30)).transports()]


def test_batches_of_any_size_come_to_rank_0() -> None:
    ranks = collections()
    for microbatches in (4, 2, 4):
        batch = played(table(microbatches), CostModel(message=0.1))
        for rank, collection in enumerate(ranks):  # rank 0 first: it waits for nothing
            collection.start(batch[rank])
        taken = [collection.finish() for collection in reversed(ranks)]
        assert taken == [None, None, batch]
    assert [collection.finish() for collection in ranks] == [None] * 3


def test_what_is_forgotten_isnt_waited_for() -> None:
    own, *_ = ranks = collections()
    own.start(played(table(2), CostModel())[0])
    own.forget()
    assert [collection.finish() for collection in ranks] == [None] * 3


def test_times_travel_alone() -> None:
    schedule = table(3)
    events = list(played(schedule, CostModel(message=0.1))[1])
    packed = pack(events)
    assert packed.shape == (3 * len(schedule.actions[1]),)
    assert unpack(schedule.actions[1], packed) == events
    assert num_microbatches(events) == 3
