"""Runs the step of a whole model before it is cut: on tensors without values, or with values where it needs them.

The model itself stays as it is. One that is built in `configure_model` is built on the meta device.

`called_stacks` finds the stack by the calls of a step, in a fork of a rank, of which nothing remains but names.

rank 0    set-up | waits ............................... | the names, to all ranks
fork               reads a batch, runs the step, ends
"""

import copy
import inspect
import json
import logging
import os
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.monitor.processes import begin_fork
from lightning_hanayo.partition.deferred_init import MetaCopy, like
from lightning_hanayo.partition.stack import Calls, find_stack, passed_stacks
from lightning_hanayo.pipeline_parallel.batches.microbatches import children, with_children

if TYPE_CHECKING:
    import lightning.pytorch as pl


_Found = TypeVar("_Found")

_MOST_REAL = 1 << 30
"""bytes of a model up to which its step runs with numbers if it can't without"""


def on_copy(
    module: "pl.LightningModule",
    batch: Any,
    dtype: torch.dtype,
    run: Callable[["pl.LightningModule", Any, set[int]], _Found],
    autocast: torch.dtype | None = None,
) -> _Found:
    """Call `run` with a copy of the module, the batch, and the numbers of the storages of the copy's parameters.

    First without values; if that fails, and the model is small, with those of the module, or any where it has none.
    Floating-point tensors have this dtype. With `autocast` the copy runs in mixed precision, as if on the CPU: tensors
    of the meta device aren't cast.

    Raises:
        HanayoError: `run` raises it, or fails with values, too, or the model is too large for them.
    """
    name, own = type(module).__name__, _on_meta(module, dtype)
    try:
        with fake_tensors(own) as parameters, _autocast(autocast):
            if autocast is None:
                return run(own, _converted(batch, dtype, "meta"), parameters)
            _fill(own)
            return run(own, _converted(batch, dtype, "cpu"), storages(list(own.parameters())))
    except HanayoError:
        raise
    except Exception as error:  # user code, which may need values
        reason = _first_line(error)
        if sum(one.nbytes for one in own.parameters()) > _MOST_REAL:
            raise HanayoError(
                f"{name}.training_step can't run on the meta device, without values ({reason}), and the model is too "
                f"large to run it with values. Make the step depend on shapes alone"
            ) from error
    own, tensors = _on_meta(module, dtype), _tensors(module)
    try:
        if len(tensors) == len(_tensors(own)) and not any(one.is_meta for one in tensors):
            own = copy.deepcopy(module, {id(one): None for one in vars(module).values() if isinstance(one, pl.Trainer)})
            vars(own).update(_fabric=None)
            own.to(dtype)
        else:
            _fill(own)
        with _autocast(autocast):
            return run(own, _converted(batch, dtype, "cpu"), storages(list(own.parameters())))
    except HanayoError:
        raise
    except Exception as again:  # user code, too
        second = _first_line(again)
        others = "" if second == reason else f" (on the meta device: {reason})"
        raise HanayoError(
            f"{name}.training_step can't run by itself, without a Trainer and on a CPU: {second}{others}. A plan needs "
            f"one step; or give the sizes to HanayoStrategy instead"
        ) from again


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype, cache_enabled=False)  # as Lightning's


def run_step(own: "pl.LightningModule", batch: Any, step: str = "training_step") -> Any:
    """Run a step of a copy, in the mode in which the Trainer does, and return its result."""
    function: Any = getattr(own, step)
    own.train(step == "training_step")
    numbers = next(one for one in ((0,), (), (0, 0)) if _accepts(function, batch, *one))  # of batch and loader
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # that there is no Trainer to log with
        return function(batch, *numbers)


def _accepts(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def recorded_calls(own: "pl.LightningModule", batch: Any, step: str = "training_step") -> Calls:
    """The calls of blocks in a step of a copy, which runs as written where it is compiled."""
    calls = Calls(own)
    has_compiled = "torch._dynamo" in sys.modules  # whose import takes seconds
    with calls.recording(), torch.compiler.set_stance("force_eager") if has_compiled else nullcontext():
        run_step(own, batch, step)
    return calls


@contextmanager
def fake_tensors(module: nn.Module) -> Iterator[set[int]]:
    """In this context tensors on the meta device are `FakeTensor`s, as while a model is exported or compiled.

    Libraries know these, and then don't look at values: transformers doesn't ask whether a mask is all ones.

    Yields:
        The numbers of the storages of the module's parameters, here and outside.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before = log.disabled
    log.disabled = True  # it prints a traceback of an error that is raised, too
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            parameters = [mode.from_tensor(one) for one in module.parameters() if not _is_packed(one)]
            yield storages(list(module.parameters())) | {one.untyped_storage()._cdata for one in parameters}
    finally:
        log.disabled = before


def storages(tensors: Sequence[Tensor]) -> set[int]:
    """The numbers of their storages."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if not _is_packed(tensor)}


def _is_packed(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter, FakeTensor) or tensor.layout is not torch.strided


def _on_meta(module: "pl.LightningModule", dtype: torch.dtype) -> "pl.LightningModule":
    """A copy without values, whose floating-point tensors have this dtype."""
    own: Any = MetaCopy(module).modules[""]
    for part in own.modules():  # a step may append to a list of the module, which the copy shares
        shared = {name: value for name, value in vars(part).items() if type(value) in (list, dict, set)}
        vars(part).update((name, value.copy()) for name, value in shared.items())
    vars(own).update(_trainer=None, _fabric=None)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own.configure_model()
    own.to(dtype)
    return own  # type: ignore[no-any-return]


def _converted(value: Any, dtype: torch.dtype, device: str) -> Any:
    """The batch with its floating-point tensors in this dtype, and all tensors on this device."""
    if isinstance(value, Tensor):
        dtype = dtype if value.is_floating_point() else value.dtype
        return torch.empty_like(value, dtype=dtype, device="meta") if device == "meta" else value.to(device, dtype)
    inside = children(value)
    if inside is None:
        return value
    return with_children(value, {key: _converted(item, dtype, device) for key, item in inside.items()})


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _fill(module: nn.Module) -> None:
    """Give the tensors small random numbers in place of none. Shared ones stay shared."""
    made: dict[Tensor, Tensor] = {}
    numbers = torch.Generator().manual_seed(0)  # its own, as the run's are needed for the training
    for part in module.modules():
        stores: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for own in stores:
            for name, tensor in own.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    values = torch.zeros_like(tensor, device="cpu")
                    values = values.uniform_(-0.02, 0.02, generator=numbers) if values.is_floating_point() else values
                    made[tensor] = like(tensor, values)
                own[name] = made[tensor]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


_TIMEOUT = 300.0
"""seconds until the names count as unknown: another thread may have held a lock when it was forked"""


def called_stacks(
    module: "pl.LightningModule", take_batch: Callable[[], Any], step: str = "training_step"
) -> Sequence[str]:
    """The names of the stack to cut, and of all that a whole module's step calls; empty if that can't be known.

    Datasets, random numbers, and what the step changes are as before, as all of it happens in a fork.

    Args:
        module: not cut yet; with values, or on the meta device.
        take_batch: called in the fork.
        step: the name of the step.
    """
    if sys.platform != "linux":  # elsewhere forks crash in system libraries
        return ()
    rank, (from_fork, to_parent) = os.getpid(), os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # it computes with one thread
        pid = os.fork()
    if pid == 0:
        try:
            begin_fork(rank)
            _isolate()
            torch.set_num_threads(1)  # a fork has lost the threads of OpenMP, and would wait for them
            os.write(to_parent, json.dumps(_names(module, take_batch(), step)).encode())
        finally:
            os._exit(0)
    os.close(to_parent)
    try:
        answer = os.read(from_fork, 1 << 16) if wait([from_fork], _TIMEOUT) else b""
    finally:
        os.close(from_fork)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return json.loads(answer) if answer else ()


def _names(module: "pl.LightningModule", batch: Any, step: str) -> list[str]:
    def find(own: "pl.LightningModule", batch: Any, _: set[int]) -> list[str]:
        calls = recorded_calls(own, batch, step)
        passed = [one.name for one in passed_stacks(own, calls)]
        return [find_stack(own, calls=calls).name, *passed] if passed else []

    return on_copy(module, batch, torch.get_default_dtype(), find)


def _isolate() -> None:
    """In a fork: print nothing, and use no connection of the parent's, such as those of its process groups."""
    dist.GroupMember.WORLD = None  # so that user code sees one process
    sys.stdout = sys.stderr = open(os.devnull, "r+")  # noqa: SIM115 - until the fork ends
    null_device = sys.stdout.fileno()
    for number in (1, 2, *map(int, os.listdir("/proc/self/fd"))):
        try:
            if number in (1, 2) or stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(null_device, number)
        except OSError:  # that of the folder
            continue
