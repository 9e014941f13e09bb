"""The states of the random generators of a process, as tensors: torch's, Python's and NumPy's.

Inside a batch torch's generators follow streams of their own (`runtime/random_streams.py`). The states count for all
else: the order of samples, what data sets and hooks draw, and the steps of a model that isn't cut.

rank that reads data    reads a batch: draws    --states-->    a hook: draws 0.3
other ranks                                                    a hook: draws 0.3
"""

import base64
import pickle
import random
from array import array
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_hanayo.runtime.comm.relay import Relay
from lightning_hanayo.seeds import default_generator

_CPU = torch.device("cpu")
_PYTHON_VERSION = 3
"""of `random.getstate()`, since Python 3.2"""


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states now, by generator: bytes of torch's, numbers of the others', [625 + 2] and [624 + 3]."""
    states = {"torch": default_generator(_CPU).get_state(), "python": _python_state(), "numpy": _numpy_state()}
    if device.type != "cpu":
        states[device.type] = default_generator(device).get_state()
    return states


def next_number() -> int:
    """The number of 62 bits that torch's generator would draw next. It is as before."""
    with torch.random.fork_rng(devices=()):
        return int(torch.randint(1 << 62, ()))


def set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators that there are states of; those of another kind of device are left out."""
    if "torch" in states:
        default_generator(_CPU).set_state(states["torch"])
    if device.type in states:
        default_generator(device).set_state(states[device.type])
    if "python" in states:
        *words, has_gauss, gauss = states["python"].tolist()
        random.setstate((_PYTHON_VERSION, tuple(map(int, words)), gauss if has_gauss else None))
    if "numpy" in states:
        _set_numpy(states["numpy"])


class SharedGenerators:
    """Gives all ranks that train one copy of the model the generators of the rank that reads its data.

    So hooks that run on all of them draw the same numbers, which are those of one process.

    Args:
        relay: over these ranks, of which the first reads the data.
        device: of this rank.
    """

    def __init__(self, relay: Relay, device: torch.device) -> None:
        self._relay = relay
        self._generators = [default_generator(each) for each in dict.fromkeys((_CPU, device))]

    def share(self) -> None:
        """Called by all these ranks, where the first may have drawn numbers that the others haven't."""
        if self._relay.transport.num_ranks == 1:
            return
        if self._relay.transport.rank == 0:
            self._relay.broadcast("random", base64.b64encode(self.packed()).decode())
        else:
            self.take(base64.b64decode(self._relay.broadcast("random")))

    def packed(self) -> bytes:
        """The states of this rank. A rank can't know whether others have them: any code may seed and restore."""
        states = [generator.get_state().numpy() for generator in self._generators]
        return pickle.dumps((states, random.getstate(), numpy.random.get_state()))

    def take(self, packed: bytes) -> None:
        """Go on from the states of another rank."""
        states, python, of_numpy = pickle.loads(packed)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(torch.from_numpy(state))
        random.setstate(python)
        numpy.random.set_state(of_numpy)


def _python_state() -> Tensor:
    _, words, gauss = random.getstate()
    return torch.frombuffer(array("d", [*words, gauss is not None, gauss or 0.0]), dtype=torch.float64)


def _numpy_state() -> Tensor:
    state: Any = numpy.random.get_state()
    _, words, position, has_gauss, gauss = state
    return torch.from_numpy(numpy.append(words.astype(numpy.float64), (position, has_gauss, gauss)))


def _set_numpy(state: Tensor) -> None:
    *words, position, has_gauss, gauss = state.tolist()
    numpy.random.set_state(("MT19937", numpy.array(words, numpy.uint32), int(position), int(has_gauss), gauss))
