"""The surroundings: what a stage's 3-D layers are told before each of its runs, and the random numbers of a cube.

All ranks of a cube draw the same numbers: layers may be dropped, and all must drop the same ones. What differs from
rank to rank, the elements that dropout drops, comes from streams of their own (`dropout.own_stream`).
"""

import hashlib

import torch

from lightning_hanayo.tensor3d.setting import Setting


class Randomness:
    """Seeds the default generators again and again, in the same way on all ranks of a cube.

    Args:
        seed: the same on all ranks of a cube, another one in other cubes.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0

    def renew(self) -> None:
        """Called by all ranks of the cube equally often."""
        self._count += 1
        text = f"{self._seed} {self._count}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))


class StageSurroundings:
    """One stage's.

    Args:
        setting: what its layers share.
        randomness: the rank's.
    """

    def __init__(self, setting: Setting, randomness: Randomness) -> None:
        self._setting = setting
        self._randomness = randomness
        self._lengths: dict[int, int] = {}

    def begin_batch(self) -> None:
        """See `runtime.gate.Surroundings`."""
        self._lengths.clear()
        self._setting.late.forget()

    def before_user(self, microbatch: int) -> None:
        """See `runtime.gate.Surroundings`."""
        self._randomness.renew()

    def before_forward(self, microbatch: int, note: int) -> None:
        """See `runtime.gate.Surroundings`: the note is the length of the sequences."""
        self._randomness.renew()
        self._lengths[microbatch] = note
        self._setting.length = note or None
        self._setting.order.begin()

    def before_backward(self, microbatch: int) -> None:
        """See `runtime.gate.Surroundings`: a layer that is computed again finds what it found before."""
        self._setting.length = self._lengths.get(microbatch) or None
        self._setting.order.begin()
