"""Pipeline rank 0 reads the user's loader; the ranks above walk in step with its shadow.

rank 0   b0  b1  b2  end        length known: nothing is said
rank 1   .   .   .   end        unknown: "one more" x 3, "end" come down the chain
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.chain import Chain
from lightning_hanayo.runtime.loopback import Hub
from lightning_hanayo.strategy.data import ShadowBatch, process
from tests.harness.limits import real_seconds

CHAIN = Chain(Hub(1).transports()[0])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(3.0)


def test_known_length() -> None:
    loader = DataLoader(torch.arange(3.0), batch_size=2)  # type: ignore[arg-type]
    assert process(loader, lambda: CHAIN, 0) is loader
    shadow = process(loader, lambda: CHAIN, 1)
    assert len(shadow) == len(list(shadow)) == len(list(shadow)) == 2


def test_unknown_length() -> None:
    above = [Chain(transport) for transport in Hub(3, timeout=real_seconds(30)).transports()]
    chains = [partial(lambda chain: chain, chain) for chain in above]
    loaders = [process(DataLoader(Stream(), batch_size=2), chain_of, rank) for rank, chain_of in enumerate(chains)]
    for _ in range(2):
        walks = [iter(loader) for loader in loaders]
        lengths = [0, 0, 0]
        for _ in range(3):  # the ranks take turns: each batch is announced before it is asked for
            for rank, walk in enumerate(walks):
                lengths[rank] += next(walk, None) is not None
        assert lengths == [2, 2, 2]
    with pytest.raises(TypeError, match="DataLoader has no length"):
        len(loaders[1])


@pytest.mark.parametrize("key", ["x", 0, 1])
def test_looking_into_a_shadow_says_what_to_do(key: object) -> None:
    with pytest.raises(UnsupportedError, match=r"was read on a pipeline rank above 0, .* `trainer.is_global_zero`"):
        ShadowBatch()[key]  # type: ignore[index]


class Resumable(DataLoader[torch.Tensor]):
    """Goes on where its state says."""

    begin = 0

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        yield from list(super().__iter__())[self.begin :]

    def state_dict(self) -> dict[str, int]:
        return {"begin": self.begin}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["begin"]


def test_a_resumed_loader_takes_its_shadow_along() -> None:
    chains = [Chain(transport) for transport in Hub(2, timeout=real_seconds(30)).transports()]
    first, shadow = (
        process(Resumable(torch.arange(4.0)), lambda chain=chain: chain, rank)  # type: ignore[arg-type]
        for rank, chain in enumerate(chains)
    )
    assert len(first) == len(shadow) == 4
    assert first.state_dict() == shadow.state_dict() == {"begin": 0}
    for loader in (first, shadow):
        loader.load_state_dict({"begin": 3})
    assert len(list(first)) == len(list(shadow)) == 1


def no_chain() -> Chain:
    raise AssertionError("asked for before it is there")


@pytest.mark.parametrize("rank", [0, 1])
def test_lengths_are_known_before_the_pipeline(rank: int) -> None:
    loader = process(Resumable(torch.arange(4.0)), no_chain, rank)  # type: ignore[arg-type]
    assert len(loader) == 4
    with pytest.raises(AssertionError, match="before it is there"):
        next(iter(loader))
