"""Pipeline rank 0 reads the user's loader; the ranks above get as many placeholders.

rank 0   b0  b1  b2  end        length certain: nothing is said
rank 1   .   .   .   end        uncertain: "one more" x 3, "end" come down the chain
"""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.transport import Relay
from lightning_hanayo.strategy.lightning.loaders import PlaceholderBatch, wrap_loader
from lightning_hanayo.topology import Topology
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub

CHAIN = Relay(Hub(1).transports()[0])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(3.0)


class Short(DataLoader[torch.Tensor]):
    """Its length is one too high."""

    def __len__(self) -> int:
        return super().__len__() + 1


LOADERS = {
    "a stream": lambda: DataLoader(Stream(), batch_size=2),
    "of known length": lambda: DataLoader(torch.arange(3.0), batch_size=2),  # type: ignore[arg-type]
    "shorter than it says": lambda: Short(torch.arange(3.0), batch_size=2),  # type: ignore[arg-type]
}


def wrapped(loader: Any, rank: int, get_relay: Callable[[], Relay]) -> Any:
    """As on a rank of a pipeline whose run has this relay."""
    get_run: Any = lambda: SimpleNamespace(pipe_relay=get_relay())  # noqa: E731
    return wrap_loader(loader, get_run, Topology(data=1, pipe=2), rank)


@pytest.mark.parametrize("kind", LOADERS)
def test_all_ranks_get_as_many_batches(kind: str) -> None:
    chains = [Relay(transport) for transport in Hub(3, timeout=real_seconds(30)).transports()]
    loaders = [wrapped(LOADERS[kind](), rank, lambda chain=chain: chain) for rank, chain in enumerate(chains)]
    for _ in range(2):
        walks = [iter(loader) for loader in loaders]
        lengths = [0, 0, 0]
        for _ in range(3):  # the ranks take turns: each batch is announced before it is asked for
            for rank, walk in enumerate(walks):
                lengths[rank] += next(walk, None) is not None
        assert lengths == [2, 2, 2]


def test_a_certain_length_is_not_announced() -> None:
    loader = LOADERS["of known length"]()
    assert wrapped(loader, 0, no_chain) is loader
    assert len(list(wrapped(loader, 1, no_chain))) == 2


def test_the_length_is_the_loaders() -> None:
    assert [len(wrapped(LOADERS["of known length"](), rank, lambda: CHAIN)) for rank in (0, 1)] == [2, 2]
    with pytest.raises(TypeError, match="DataLoader has no length"):
        len(wrapped(LOADERS["a stream"](), 1, lambda: CHAIN))


USES = {
    "key": lambda batch: batch["x"],
    "length": len,
    "contains": lambda batch: "x" in batch,
    "get": lambda batch: batch.get("x"),
    "items": lambda batch: list(batch.items()),
    "rows": lambda batch: batch[:, 0],
    "unpacked": lambda batch: [*batch],
    "attribute": lambda batch: batch.x,
    "assigned": lambda batch: setattr(batch, "x", 1),
    "deleted": lambda batch: batch.__delitem__(0),
    "compared": lambda batch: batch == 1,
}


@pytest.mark.parametrize("use", USES)
def test_each_use_of_a_placeholder_says_what_to_do(use: str) -> None:
    batch = PlaceholderBatch().content
    assert f"{batch}" and copy.copy(batch) is not None, "it can be passed on"
    with pytest.raises(UnsupportedError, match=r"test_loaders.*reads the batch .*on_train_batch_end.*is_global_zero"):
        USES[use](batch)


class Resumable(DataLoader[torch.Tensor]):
    """Goes on where its state says."""

    begin = 0

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        yield from list(super().__iter__())[self.begin :]

    def state_dict(self) -> dict[str, int]:
        return {"begin": self.begin}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["begin"]


def test_a_resumed_loader_takes_its_placeholder_along() -> None:
    chains = [Relay(transport) for transport in Hub(2, timeout=real_seconds(30)).transports()]
    first, above = (
        wrapped(Resumable(torch.arange(4.0)), rank, lambda chain=chain: chain)  # type: ignore[arg-type]
        for rank, chain in enumerate(chains)
    )
    assert len(first) == len(above) == 4
    assert first.state_dict() == {"begin": 0}
    assert not hasattr(above, "state_dict") and not hasattr(above, "load_state_dict")
    first.load_state_dict({"begin": 3})
    assert len(list(first)) == len(list(above)) == 1


def no_chain() -> Relay:
    raise AssertionError("asked for before it is there")


@pytest.mark.parametrize("rank", [0, 1])
def test_lengths_are_known_before_the_pipeline(rank: int) -> None:
    loader = wrapped(Resumable(torch.arange(4.0)), rank, no_chain)  # type: ignore[arg-type]
    assert len(loader) == 4
    with pytest.raises(AssertionError, match="before it is there"):
        next(iter(loader))
