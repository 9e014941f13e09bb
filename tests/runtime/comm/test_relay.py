"""The relay brings rank 0's value to all ranks, whatever its length.

JSON   0 B ... 504 B | longer: a second message
"""

from typing import Any

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.pipeline_parallel.transport import Relay
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub

VALUES = [None, True, 0, [4, 2**52], {"loss": [0.1, "float32"]}, float("inf")]


def broadcast(num_ranks: int, values: list[Any]) -> list[list[Any]]:
    """What each rank gets."""
    relays = [Relay(transport) for transport in Hub(num_ranks, timeout=real_seconds(30)).transports()]
    return [
        [relay.broadcast("metrics", value if rank == 0 else "ignored") for value in values]
        for rank, relay in enumerate(relays)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_ranks_get_the_first_ones_values(num_ranks: int) -> None:
    assert broadcast(num_ranks, VALUES) == [VALUES] * num_ranks


def test_longer_than_a_frame() -> None:
    texts = ["x" * length for length in (0, 500, 501, 502, 503, 504, 505, 600, 100_000, 1)]
    assert broadcast(3, texts) == [texts] * 3


def test_the_error_for_a_wrong_kind_names_both() -> None:
    first, second = (Relay(transport) for transport in Hub(2, timeout=real_seconds(30)).transports())
    first.broadcast("metrics", {"loss": 1.0})
    with pytest.raises(HanayoError, match=r"pipeline rank 1 .*'batch'.* rank 0 .*'metrics'"):
        second.broadcast("batch")


def test_the_first_rank_may_be_ahead() -> None:
    """By all that a step sends: it begins the next one while the others still end theirs."""
    first, second = (Relay(transport) for transport in Hub(2, timeout=real_seconds(30)).transports())
    for value in range(10):
        first.broadcast("data", value)
    assert [second.broadcast("data") for _ in range(10)] == list(range(10))
