"""Gives the steps of one process the random numbers that a layout draws: each stream is seeded by its key.

the step's own code    key: seed, data rank, batch, micro-batch
block i                key: the same and i, and from its second call on the number of earlier ones;
                       the step's own code draws one number at each call, and then continues
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_hanayo.seeds import mix, seed_of


class KeyedRandom:
    """The random streams of one process.

    Args:
        seed: of the run.
        is_keyed: False: torch's generator is left as it is, as where nothing is cut.
    """

    def __init__(self, seed: int, *, is_keyed: bool) -> None:
        self.has_drawn = False
        """whether user code has drawn a number"""
        self._seed = seed
        self._is_keyed = is_keyed
        self._batch = ""
        self._microbatch = 0
        self._block_seeds: dict[int, int] = {}
        """by the number that was drawn at the block's call, so that a recomputed block finds its seed again"""
        self._num_calls: Counter[int] = Counter()
        """of each block, for the micro-batch under way"""
        self._callers: list[tuple[Tensor, Tensor]] = []
        """of each block under way: the state of its caller's stream, and with which its own has begun"""
        self._untouched = torch.Generator()
        """draws only what this class draws in the step's own stream"""

    def attach(self, blocks: tuple[nn.Module, ...]) -> None:
        """Give each block its own stream."""
        if not self._is_keyed:
            return
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, index=index: self._enter_block(index))
            block.register_forward_hook(lambda *_: self._leave_block(), always_call=True)

    @contextmanager
    def batch(self, key: str) -> Iterator[None]:
        """Inside, numbers are those of the batch that `key` names. Afterwards the generator is as it was before."""
        self._batch = key
        state = torch.get_rng_state()
        yield
        if self._is_keyed:
            torch.set_rng_state(state)

    def begin(self, data_rank: int, microbatch: int) -> None:
        """Start the stream of the step's own code for a micro-batch."""
        if self._is_keyed:
            self._microbatch = seed_of(self._seed, data_rank, self._batch, microbatch)
            torch.default_generator.manual_seed(self._microbatch)
        self._num_calls.clear()
        self._untouched.set_state(torch.get_rng_state())

    def end(self) -> None:
        """The step has ended."""
        self.has_drawn |= not torch.equal(torch.get_rng_state(), self._untouched.get_state())

    def _enter_block(self, index: int) -> None:
        number = int(torch.randint(1 << 62, ()))
        if number not in self._block_seeds:  # else the backward recomputes it
            torch.randint(1 << 62, (), generator=self._untouched)
            seed, call = mix(self._microbatch, index), self._num_calls[index]
            self._block_seeds[number] = mix(seed, call) if call else seed
            self._num_calls[index] += 1
        seed = self._block_seeds[number]
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        self._callers.append((state, torch.get_rng_state()))

    def _leave_block(self) -> None:
        state, first = self._callers.pop()
        self.has_drawn |= not torch.equal(torch.get_rng_state(), first)
        torch.set_rng_state(state)
