"""Random streams: makes every random number of a step depend on a key, and not on the layout or the schedule.

the step's own code    key: seed, data rank, step, micro-batch, rank in the cube
block i of the stack   key: seed, data rank, step, micro-batch, i, and after the first pass its number

    rank 0    | code 0 | block 0 | block 1 | code 1 | block 0 | ...     each | starts a stream; after the stack,
    rank 1                       | block 2 | block 3 |  ...             code 0 continues its own

So dropout masks are the same for any number of pipeline ranks and waves, under every schedule, with recomputation and
after a resume. The keys cover torch's default generators on the CPU and on the rank's device, but not Python's and
NumPy's generators. After a batch torch's generators have the state that they had before it. Outside of batches all
generators count: for the order of samples, numbers in data sets and hooks, and the steps of a model that isn't cut.
"""

import base64
import pickle
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_hanayo.pipeline_parallel.transport import Relay
from lightning_hanayo.schedule import Kind
from lightning_hanayo.seeds import default_generator, mix, seed_of

_BEFORE_BLOCK = 1
"""mixed into the seed of a block: that of the code in front of it"""


class RandomStreams:
    """The random streams of one rank.

    All ranks give the same `seed`; with None there are no streams. The ranks of a cube that run user code on other
    samples give their `cube_rank`.
    """

    def __init__(self, seed: int | None, data_rank: int, device: torch.device, *, cube_rank: int = 0) -> None:
        self._fixed = seed, data_rank
        self._own_rank = self._cube_rank = cube_rank
        self.num_local = 0
        """how many of the first blocks the batch's steps run themselves"""
        devices = dict.fromkeys((torch.device("cpu"), device)) if seed is not None else ()
        self._generators = [default_generator(each) for each in devices]
        self._batch: str | None = None
        self._microbatch: int | None = None
        self._seed = 0
        self._pass_number = 0
        self._seeds: dict[int, int] = {}
        """by micro-batch, of the batch under way"""
        self._in_forward = True
        self._calls: dict[tuple[int, int], list[int]] = {}
        """by micro-batch and block: a number drawn from the caller's stream at each of its calls"""

    def reseed(self, seed: int) -> None:
        """Go on as the run that had this seed. Called by all ranks, between batches."""
        _, data_rank = self._fixed
        self._fixed = seed, data_rank

    @contextmanager
    def batch(self, key: str, *, has_shares: bool = True) -> Iterator[None]:
        """Make the random numbers of one batch depend on `key`, which is the same on all ranks and after a resume.

        `has_shares`: the ranks of a cube have their own samples, where they ever do.
        """
        if not self._generators:
            yield
            return
        before = self._states()
        self._batch = key
        self._cube_rank = self._own_rank if has_shares else 0
        try:
            yield
        finally:
            self._batch = self._microbatch = None
            self._seeds.clear()
            self._calls.clear()
            self._restore(before)

    def begin_action(self, microbatch: int, kind: Kind, pass_number: int = 0) -> None:
        """Called before each action of the rank, in a pass through the stack.

        In a forward, user code and blocks then start streams of their own.
        """
        self._pass_number = pass_number
        if self._batch is not None and kind is not Kind.W:  # a weight gradient draws no random numbers
            self._enter(microbatch, is_forward=kind is Kind.F)
            if not self._in_forward:
                self._start(self._seed)

    def begin_user_code(self, microbatch: int) -> None:
        """Called before the step's own code for this micro-batch starts."""
        if self._batch is None:
            return
        self._enter(microbatch, is_forward=True)
        own = seed_of(*self._fixed, self._batch, microbatch, self._cube_rank) if self._cube_rank else self._seed
        self._start(own)

    def save(self) -> tuple[Any, ...]:
        """State of the action that runs now, to be restored after another one has run."""
        return self._microbatch, self._in_forward, self._seed, self._states()

    def restore(self, saved: tuple[Any, ...]) -> None:
        """The action runs again: its streams go on."""
        self._microbatch, self._in_forward, self._seed, states = saved
        self._restore(states)

    @property
    def is_active(self) -> bool:
        """Whether random numbers depend on keys now: in a batch, but not under a transform of `torch.func`."""
        return self._microbatch is not None and not torch._C._are_functorch_transforms_active()

    def begin_block(self, index: int) -> None:
        """Start the stream of block `index`, where no other stream is continued afterwards."""
        if self.is_active:
            seed = mix(self._seed, index)
            self._start(mix(seed, self._pass_number) if self._pass_number else seed)

    def begin_code_before(self, index: int) -> None:
        """Start the stream of the code in front of block `index`, behind another one."""
        if self.is_active:
            self._start(mix(mix(mix(self._seed, index), self._pass_number), _BEFORE_BLOCK))

    def block(self, index: int, *, repeats: bool = False) -> AbstractContextManager[Any]:
        """Let block `index` use its own stream inside a `with` statement; then its caller continues the earlier one.

        With `repeats` the step may call the block several times, each with a stream of its own.
        """
        return _Stream(self, self._seed_of(index, repeats)) if self.is_active else nullcontext()

    def pass_block(self) -> None:
        """Called for a block that runs elsewhere: its caller's stream advances as if it ran here."""
        if self.is_active:
            _draw()

    def kept(self) -> AbstractContextManager[Any]:
        """Other code runs inside it; then the caller continues its own stream."""
        return _Stream(self) if self.is_active else nullcontext()

    def _seed_of(self, index: int, repeats: bool) -> int:
        """Return the seed of a block's stream, for its first call or for a later one.

        Each call draws a number from the caller's stream. An activation checkpoint restores that stream before it runs
        the block again, so the number identifies the call; an unknown number means the first call.
        """
        drawn, seed = _draw(), mix(self._seed, index)
        if not repeats:
            return seed
        assert self._microbatch is not None
        number = int(drawn)
        calls = self._calls.setdefault((self._microbatch, index), [])
        if self._in_forward and number not in calls:
            calls.append(number)
        call = calls.index(number) if number in calls else 0
        return mix(seed, call) if call else seed

    def _enter(self, microbatch: int, *, is_forward: bool) -> None:
        seed = self._seeds.get(microbatch)
        if seed is None:
            seed = self._seeds[microbatch] = seed_of(*self._fixed, self._batch, microbatch)
        self._microbatch, self._in_forward, self._seed = microbatch, is_forward, seed

    def _start(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _restore(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _draw() -> Tensor:
    return torch.randint(1 << 62, (), device="cpu")


@dataclass(slots=True)
class _Stream:
    """Another stream, of this seed, or of code that starts its own; then the earlier one continues.

    A generator-based context manager would take as long as the work itself.
    """

    streams: RandomStreams
    seed: int | None = None
    states: Sequence[Tensor] = ()

    def __enter__(self) -> None:
        self.states = self.streams._states()
        if self.seed is not None:
            self.streams._start(self.seed)

    def __exit__(self, *_: object) -> None:
        self.streams._restore(self.states)


NO_STREAMS = RandomStreams(None, 0, torch.device("cpu"))
"""leave torch's own generators as they are"""
_CPU = torch.device("cpu")
_PYTHON_VERSION = 3
"""of `random.getstate()`, since Python 3.2"""


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states now, by generator: bytes of torch's, numbers of the others', [625 + 2] and [624 + 3]."""
    _, words, gauss = random.getstate()
    python = torch.frombuffer(array("d", [*words, gauss is not None, gauss or 0.0]), dtype=torch.float64)
    of_numpy: Any = numpy.random.get_state()
    _, keys, position, has_gauss, cached = of_numpy
    numbers = torch.from_numpy(numpy.append(keys.astype(numpy.float64), (position, has_gauss, cached)))
    states = {"torch": default_generator(_CPU).get_state(), "python": python, "numpy": numbers}
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
        *words, position, has_gauss, gauss = states["numpy"].tolist()
        numpy.random.set_state(("MT19937", numpy.array(words, numpy.uint32), int(position), int(has_gauss), gauss))


@dataclass(eq=False)
class SharedGenerators:
    """Gives all ranks that train one copy of the model the generators of the rank that reads its data.

    So hooks that run on all of them draw the same numbers, which are those of one process:

        rank that reads data    reads a batch: draws    --states-->    a hook: draws 0.3
        other ranks                                                    a hook: draws 0.3

    States that are those shared before aren't sent again: the other ranks have kept them.
    """

    relay: Relay
    """over these ranks, of which the first reads the data"""
    device: torch.device
    """of this rank"""
    _shared: bytes = field(default=b"", init=False, repr=False)
    """the states that were shared last"""

    def share(self) -> None:
        """Called by all these ranks, where the first may have drawn numbers that the others haven't."""
        if self.relay.transport.num_ranks == 1:
            return
        if self.relay.transport.rank == 0:
            before, self._shared = self._shared, self.packed()
            self.relay.broadcast("random", "" if self._shared == before else base64.b64encode(self._shared).decode())
        else:
            self._shared = base64.b64decode(self.relay.broadcast("random")) or self._shared
            self.take(self._shared)

    def packed(self) -> bytes:
        """The states of this rank. A rank can't know whether others have them: any code may seed and restore."""
        return pickle.dumps({name: state.numpy() for name, state in generator_states(self.device).items()})

    def take(self, packed: bytes) -> None:
        """Go on from the states of another rank."""
        set_generators({name: torch.from_numpy(state) for name, state in pickle.loads(packed).items()}, self.device)
