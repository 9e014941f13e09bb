"""Random streams depend on their keys alone, and leave torch's generators as they were.

caller    a0 a1 | block 3: b0 b1 | a2 ...        b depends on the key alone; a goes on, whatever the block draws
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_hanayo.pipeline_parallel.capture import forward_patch
from lightning_hanayo.pipeline_parallel.rng import RandomStreams
from lightning_hanayo.schedule import Kind
from lightning_hanayo.seeds import mix, seed_of

CPU = torch.device("cpu")


def draws(streams: RandomStreams, microbatch: int, index: int, calls: int = 1) -> list[list[float]]:
    """The numbers that a block draws in each of its calls."""
    streams.begin_action(microbatch, Kind.F)
    found = []
    for _ in range(calls):
        with streams.block(index):
            found.append(torch.rand(2).tolist())
    return found


def test_a_blocks_numbers_depend_on_its_key_alone() -> None:
    seen = {}
    for seed, data_rank, cube_rank in ((0, 0, 0), (0, 0, 5), (1, 0, 0), (0, 1, 0)):
        streams = RandomStreams(seed, data_rank, CPU, cube_rank=cube_rank)
        for batch in ("train 0 0", "train 0 1", "train 1 0"):
            torch.manual_seed(cube_rank)  # must not matter
            with streams.batch(batch):
                for microbatch in (1, 0):
                    torch.rand(microbatch)
                    for index in (3, 0):
                        (seen[seed, data_rank, cube_rank, batch, microbatch, index],) = draws(
                            streams, microbatch, index
                        )
    alike = {key: value for key, value in seen.items() if key[2] == 0}
    assert all(seen[key[0], key[1], 0, *key[3:]] == value for key, value in seen.items()), (
        "the cube's rank counts for no block"
    )
    assert len({str(value) for value in alike.values()}) == len(alike)


def test_the_steps_own_code_depends_on_its_rank_in_the_cube() -> None:
    seen = []
    for cube_rank in (0, 1):
        streams = RandomStreams(0, 0, CPU, cube_rank=cube_rank)
        with streams.batch("train 0 0"):
            streams.begin_action(0, Kind.F)
            streams.begin_user_code(0)
            seen.append(torch.rand(2).tolist())
    assert seen[0] != seen[1]


def test_a_block_does_not_change_its_callers_stream() -> None:
    streams, seen = RandomStreams(0, 0, CPU), []
    for count in (0, 1, 100):
        with streams.batch("train 0 0"):
            streams.begin_action(0, Kind.F)
            first = torch.rand(1).item()
            with streams.block(1):
                torch.rand(count)
            seen.append((first, torch.rand(1).item()))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_leaves_torchs_generator_as_it_was(fails: bool) -> None:
    torch.manual_seed(3)
    torch.rand(5)
    before, streams = torch.get_rng_state(), RandomStreams(0, 0, CPU)
    try:
        with streams.batch("train 0 0"):
            draws(streams, 0, 0)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == 3


def test_outside_a_batch_streams_do_nothing() -> None:
    streams = RandomStreams(0, 0, CPU)
    torch.manual_seed(3)
    with streams.block(0):
        inside = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(inside, torch.rand(2))


@pytest.mark.parametrize("kind", [Kind.F, Kind.B], ids=["in a forward", "in a backward"])
def test_another_call_has_another_stream_and_a_recomputation_the_same(kind: Kind) -> None:
    streams = RandomStreams(0, 0, CPU)
    with streams.batch("train 0 0"):
        streams.begin_action(0, Kind.F)
        states, seen = [], []
        for _ in range(3):
            states.append(torch.get_rng_state())
            with streams.block(1, repeats=True):
                seen.append(torch.rand(2).tolist())
        assert len({str(one) for one in seen}) == 3
        if kind is Kind.B:
            streams.begin_action(0, kind)
        for state, one in reversed(list(zip(states, seen, strict=True))):  # as an activation checkpoint does
            torch.set_rng_state(state)
            with streams.block(1, repeats=True):
                assert torch.rand(2).tolist() == one


def test_a_recomputation_that_restores_nothing_means_the_first_call() -> None:
    """`checkpoint(..., preserve_rng_state=False)`: correct if a block is called once, as in a pipeline."""
    streams = RandomStreams(0, 0, CPU)
    with streams.batch("train 0 0"):
        streams.begin_action(0, Kind.F)
        with streams.block(1, repeats=True):
            drawn = torch.rand(2).tolist()
        streams.begin_action(0, Kind.B)
        torch.rand(7)
        with streams.block(1, repeats=True):
            assert torch.rand(2).tolist() == drawn


def test_vmap_runs_a_block_in_its_callers_stream() -> None:
    streams = RandomStreams(0, 0, CPU)

    def in_stream(x: torch.Tensor) -> torch.Tensor:
        with streams.block(0):
            return 2 * x

    with streams.batch("train 0 0"):
        streams.begin_action(0, Kind.F)
        assert torch.equal(torch.vmap(in_stream)(torch.ones(3)), torch.full((3,), 2.0))


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(())


def test_copies_of_a_block_have_no_streams() -> None:
    block, streams = Noisy(), RandomStreams(0, 0, CPU)
    forward_patch.patch_blocks([block], streams, single_stage=True)
    with streams.batch("train 0 0"):
        for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            streams.begin_action(0, Kind.F)
            streams.begin_user_code(0)
            noise = torch.rand(())
            streams.begin_user_code(0)
            assert torch.equal(copied(torch.zeros(())), noise)
    forward_patch.unpatch_blocks([block])
    assert vars(block).keys() == vars(Noisy()).keys()


def test_seeds_differ() -> None:
    assert seed_of("train", 3, 0) == seed_of("train", 3, 0) != seed_of("train", 30)
    seeds = {mix(number, cube_rank) for number in range(100) for cube_rank in range(100)}
    assert len(seeds) == 10_000 and all(0 <= seed < 1 << 64 for seed in seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 9_990, "of which the CPU's generator uses 32 bits"
