"""The states of the random generators of a process, as tensors: torch's, Python's and NumPy's.

Inside a batch torch's generators follow streams of their own (`runtime/random_streams.py`). The states count for all
else: the order of samples, what data sets and hooks draw, and the steps of a model that isn't cut.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.seeds import default_generator

_CPU = torch.device("cpu")
_PYTHON_VERSION = 3
"""of `random.getstate()`, since Python 3.2"""


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states now, by generator: bytes of torch's, numbers of the others', [625 + 2] and [624 + 3]."""
    states = {"torch": default_generator(_CPU).get_state(), "python": _python_state()}
    if device.type != "cpu":
        states[device.type] = default_generator(device).get_state()
    if "numpy" in sys.modules:
        states["numpy"] = _numpy_state()
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


def _python_state() -> Tensor:
    _, words, gauss = random.getstate()
    return torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64)


def _numpy_state() -> Tensor:
    import numpy

    state: Any = numpy.random.get_state()
    _, words, position, has_gauss, gauss = state
    return torch.tensor([*words.tolist(), position, has_gauss, gauss], dtype=torch.float64)


def _set_numpy(state: Tensor) -> None:
    import numpy

    *words, position, has_gauss, gauss = state.tolist()
    numpy.random.set_state(("MT19937", numpy.array(words, numpy.uint32), int(position), int(has_gauss), gauss))
