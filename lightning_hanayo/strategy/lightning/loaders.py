"""Data loaders: pipeline rank 0 reads the user's loader; the ranks above it get as many placeholder batches.

On these ranks hooks that would work on data are skipped.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from math import prod
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, sized_len
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError, available
from lightning_hanayo.monitor.processes import begin_fork, heed_signals_of_parent_alone
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchSource
from lightning_hanayo.pipeline_parallel.object_collectives import broadcast_object
from lightning_hanayo.pipeline_parallel.rng import generator_states
from lightning_hanayo.strategy.lightning.loops import SameLength
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.user_code.collected import Missing
from lightning_hanayo.topology import Topology

_EVALUATION_ENDS = ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")
_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)
"""samplers that give as many indices as their length says"""
_OF_READERS = ("state_dict", "load_state_dict", "batch_sampler")
"""attributes of a loader that is read: its position, and the indices of the samples in the batches"""
_END = object()


class PlaceholderBatch(dict[str, Any]):
    """Takes the place of a batch on pipeline ranks above 0. Lightning passes it on, and counts one sample in it.

    Hooks get its `content`: until the step has ended, every use of it but passing it on raises an error.
    """

    def __init__(self, *_: Any) -> None:
        super().__init__(placeholder=torch.zeros(1))
        self.content: Any = Missing(
            "the batch",
            "until its step has ended, pipeline rank 0 alone has it",
            "Read it in the step, in a hook that comes later, such as on_train_batch_end, or under "
            "`if self.trainer.is_global_zero:`, where nothing may depend on it that all ranks do",
        )


GetRun = Callable[[], Run]
"""Returns the run under way. Loaders may be asked for, and for their length, before there is one."""


class _LoaderWrapper:
    def __init__(self, loader: Any, get_run: GetRun) -> None:
        self.loader, self._get_run = loader, get_run

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_get_run", "_same_length") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)  # state_dict, sampler, set_epoch: whatever Lightning asks a loader for

    def __len__(self) -> int:
        length = self._length
        if length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return length

    @property
    def _length(self) -> int | None:
        return sized_len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self._read(iter(self.loader))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches


class PlaceholderLoader(_LoaderWrapper):
    """Placeholder batches on the ranks above 0: as many as the user's loader has, or as rank 0 announces."""

    def __init__(self, loader: Any, get_run: GetRun, same_length: SameLength | None, *, is_certain: bool) -> None:
        super().__init__(loader, get_run)
        self._same_length, self._is_certain = same_length, is_certain

    @property
    @override
    def _length(self) -> int | None:
        return super()._length if self._same_length is None else self._same_length.length

    @override
    def __getattr__(self, name: str) -> Any:
        if name in _OF_READERS:
            raise AttributeError(name)
        return super().__getattr__(name)

    @override
    def __iter__(self) -> Iterator[PlaceholderBatch]:
        if self._is_certain:
            for _ in range(len(self)):
                yield PlaceholderBatch()
        else:
            relay = self._get_run().pipe_relay
            while relay.broadcast("data"):
                yield PlaceholderBatch()


class EqualLoader(_LoaderWrapper):
    """The user's training loader on one of several data ranks: it ends when the first of them has no more batches."""

    def __init__(self, loader: Any, get_run: GetRun, same_length: SameLength) -> None:
        super().__init__(loader, get_run)
        self.leaves_out = False
        """whether the epoch that was read last has ended before the loader did"""
        self._same_length = same_length

    @property
    @override
    def _length(self) -> int | None:
        return self._same_length.length

    @override
    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.leaves_out = False
        if self._same_length.is_certain and self._length is not None:
            self.leaves_out = self._length < len(self.loader)
            yield from islice(batches, self._length)
            return
        for num_read in count():
            batch = next(batches, _END)
            if not self._same_length.all_have_one_more(batch is not _END, num_read):
                self.leaves_out = batch is not _END
                return
            yield batch


class AnnouncingLoader(_LoaderWrapper):
    """The user's loader on pipeline rank 0, where its length isn't certain: announces each batch and the end."""

    @override
    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        relay = self._get_run().pipe_relay
        for batch in batches:
            relay.broadcast("data", True)
            yield batch
        relay.broadcast("data", False)


class CubeLoader(_LoaderWrapper):
    """The user's loader on a cube of ranks: the first of them reads it, and broadcasts each batch to the others.

    They get its random generators, too, from which the hooks draw that transfer the batch.
    """

    @override
    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler" and self._cube.rank() > 0:
            raise AttributeError(name)
        return super().__getattr__(name)

    @override
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._cube.rank() == 0 else self._receive()

    @property
    def _cube(self) -> dist.ProcessGroup:
        """No local variable holds the group: it would outlive a failure."""
        group: dist.ProcessGroup = available(self._get_run().groups.cube, "the model is cut over a cube").whole
        return group

    @override
    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            broadcast_object((batch, self._get_run().generators.packed()), self._cube)
            yield batch
        broadcast_object((), self._cube)

    def _receive(self) -> Iterator[Any]:
        while message := broadcast_object((), self._cube):
            batch, states = message
            self._get_run().generators.take(states)
            yield batch


class ResumableLoader(_LoaderWrapper):
    """A loader with `state_dict()` and `load_state_dict()`, where data is read."""

    def __init__(self, loader: Any, get_run: GetRun) -> None:
        super().__init__(loader, get_run)
        self.state_before: Any = None
        self.random_before: dict[str, Tensor] = {}
        """the loader's state and the random generators' before the batch that was read last, if it has no length"""
        self._is_loaded = False

    def load_state_dict(self, state: Any) -> None:
        """Let the next iteration continue where the state says."""
        self.loader.load_state_dict(state)
        self._is_loaded = True

    def skip_rest(self) -> None:
        """Let the next iteration be a new epoch, though the state that was loaded is in the middle of one."""
        next(iter(self.loader), None)
        self._is_loaded = False

    def __iter__(self) -> Iterator[Any]:
        """Continue; a state at the end of the data is that of the epoch before."""
        random_state = torch.get_rng_state()
        return self._continue(iter(self.loader), random_state)

    def _continue(self, batches: Iterator[Any], random_state: Tensor) -> Iterator[Any]:
        was_loaded, self._is_loaded = self._is_loaded, False  # only now: an iterator may be made, and never read
        is_empty = True
        for batch in self._read(batches):
            is_empty = False
            yield batch
        if is_empty and was_loaded:
            torch.set_rng_state(random_state)
            yield from self._read(iter(self.loader))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        is_read_ahead = sized_len(self.loader) is None
        while True:
            if is_read_ahead:
                self.state_before, self.random_before = self.loader.state_dict(), generator_states(torch.device("cpu"))
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


def _has_certain_length(loader: Any) -> bool:
    """Whether the loader surely gives `len(loader)` batches: torch's own, with torch's samplers over a sized dataset.

    Every other loader may end before its length, and Lightning then ends the epoch: a stream, a sampler or loader of
    the user's, one that is resumed in the middle.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    batches = loader.batch_sampler
    samplers = [loader.sampler] if batches is None else [loader.sampler, getattr(batches, "sampler", None)]
    return all(type(sampler) in _SAMPLERS for sampler in samplers) and type(batches) in (type(None), BatchSampler)


def wrap_loader(loader: Any, get_run: GetRun, topology: Topology, pipe_rank: int, *, is_shortened: bool = False) -> Any:
    """The loader that a rank iterates over instead of the user's `loader`.

    Args:
        loader: the user's.
        get_run: called when it is iterated.
        topology: of the ranks.
        pipe_rank: this process's place on the pipeline axis.
        is_shortened: whether all data ranks train with as many batches; else this rank reads all of its own.
    """
    is_certain, same_length = _has_certain_length(loader), None
    if is_shortened:
        same_length = SameLength(sized_len(loader), is_certain, get_run)
        is_certain = same_length.is_certain
    if pipe_rank > 0:
        return PlaceholderLoader(loader, get_run, same_length, is_certain=is_certain)
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    own = ResumableLoader(loader, get_run) if has_state else loader
    shared = CubeLoader(own, get_run) if prod(topology.cube) > 1 else own
    if same_length is not None and not (is_certain and same_length.length == len(loader)):
        shared = EqualLoader(shared, get_run, same_length)
    return shared if is_certain or topology.pipe == 1 else AnnouncingLoader(shared, get_run)


def end_workers_with_process(loader: Any, rank: int, attributes: TemporaryAttributes) -> None:
    """Let a loader's worker processes end with this one, also if they hang in user code. `rank`: the global one.

    Linux ends them with the thread that starts them, so it must be one that lives as long as the process.
    """
    if not isinstance(loader, DataLoader) or threading.current_thread() != threading.main_thread():
        return
    if loader.num_workers and not isinstance(loader.worker_init_fn, _WorkerStart):
        _auto_add_worker_init_fn(loader, rank)  # Lightning would see ours, and not add its own
        attributes.set(loader, "worker_init_fn", _WorkerStart(loader.worker_init_fn))


class _WorkerStart:
    """Called first in a worker process."""

    def __init__(self, user_function: Callable[[int], object] | None) -> None:
        self._user_function = user_function

    def __call__(self, worker: int) -> None:
        begin_fork()
        heed_signals_of_parent_alone()
        if self._user_function is not None:
            self._user_function(worker)


def check_sampler(loader: Any, *, num_data: int, num_ranks: int) -> None:
    """Check that a sampler of the user's counts the ranks that see different batches.

    Raises:
        UnsupportedError: it counts all processes, so that some samples would be read by none.
    """
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    if any(isinstance(one, DistributedSampler) and one.num_replicas == num_ranks > num_data for one in samplers):
        raise UnsupportedError(
            f"a DistributedSampler deals samples out to {num_ranks} ranks, of which {num_data} read data: the rest "
            f"would be skipped. Leave it out, or pass it **self.trainer.distributed_sampler_kwargs."
        )


def after_new_iterators(trainer: "pl.Trainer", attributes: TemporaryAttributes, call: Callable[[], None]) -> None:
    """Call a function whenever a loop of the Trainer has begun to read its loader, before the hooks that come next."""
    fit_loop: Any = trainer.fit_loop
    evaluations = (fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop, name in ((fit_loop, "setup_data"), *((loop, "reset") for loop in evaluations)):

        def then_call(method: Callable[[], None], loop: Any = loop) -> None:
            fetcher = loop._data_fetcher
            method()
            if loop._data_fetcher is not fetcher:
                call()

        attributes.wrap(loop, name, then_call)


def source_of(trainer: "pl.Trainer") -> BatchSource:
    """Where the batch under way comes from, on a rank with data."""
    stage = "" if trainer.state.stage is None else trainer.state.stage.value
    loop: Any = trainer._active_loop
    combined: CombinedLoader | None = loop._combined_loader
    if combined is None:
        return BatchSource(stage, module=trainer.lightning_module)
    loaders = None if combined._mode == "sequential" else shape_of_loaders(combined.iterables)
    # Some `DataLoader(batch_size=None)` without a `collate_fn` hands on the items of its dataset.
    is_unbatched = any(getattr(one, "collate_fn", None) is default_convert for one in combined.flattened)
    is_collated = are_collated(combined.flattened)
    return BatchSource(stage, loaders, is_collated, is_unbatched=is_unbatched, module=trainer.lightning_module)


def first_batch(trainer: "pl.Trainer", module: "pl.LightningModule") -> Any:
    """The first batch of the run that begins, read and changed by hooks in this process, and not moved to a device.

    It changes the states of datasets and random numbers: called in a fork of a rank.

    Raises:
        UnsupportedError: a loader isn't torch's, or may read what the fork shares with the rank.
    """
    loop: Any = trainer._active_loop
    source = loop._data_source
    is_hook = isinstance(source.instance, pl.LightningModule | pl.LightningDataModule)
    loaders = getattr(source.instance, source.name)() if is_hook else source.instance
    if not isinstance(loaders, CombinedLoader):
        loaders = CombinedLoader(loaders, "max_size_cycle" if trainer.training else "sequential")
    combined = copy.copy(loaders)
    copies = [copy.copy(loader) for loader in combined.flattened]
    for loader in copies:
        if not isinstance(loader, DataLoader) or (
            isinstance(loader.dataset, IterableDataset) and not loader.num_workers
        ):
            raise UnsupportedError("a stream may have one position for both processes")
        vars(loader).update(num_workers=0, pin_memory=False, timeout=0)
    combined.flattened = copies
    batch = next(iter(combined))[0]
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        data = vars(trainer).get("datamodule")
        owner = data if data is not None and is_overridden(hook, data) else module
        batch = getattr(owner, hook)(batch, 0)
    return batch


def are_collated(loaders: Iterable[Any]) -> bool:
    """Whether torch's `default_collate` makes the batches of all loaders."""
    return all(getattr(loader, "collate_fn", None) is default_collate for loader in loaders)


def shape_of_loaders(loaders: Any) -> Any:
    """The containers of several loaders, with None for each of them."""
    if isinstance(loaders, Mapping):
        return {key: shape_of_loaders(value) for key, value in loaders.items()}
    return list(map(shape_of_loaders, loaders)) if isinstance(loaders, (list, tuple)) else None


def skip_hooks_without_data(module: "pl.LightningModule", attributes: TemporaryAttributes) -> None:
    """On a rank that gets no data, skip batch transfer and the ends of evaluation epochs.

    There is nothing to transfer, and no step has collected anything; metrics come from pipeline rank 0 anyway.
    """
    for hook in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
        attributes.set(module, hook, _as_placeholder)
    for hook in _EVALUATION_ENDS:
        attributes.set(module, hook, _no_op)


def _as_placeholder(batch: Any, *_: Any, **__: Any) -> PlaceholderBatch:
    """One placeholder, also for a batch of several loaders. A function of this module: it can be pickled."""
    return batch if isinstance(batch, PlaceholderBatch) else PlaceholderBatch()


def _no_op() -> None:
    """A function of this module, so that the user's module can be pickled."""
