"""Reads one plain checkpoint file, as a Trainer writes it: all ranks map it, and read the tensors that they need.

Writes a checkpoint that is one file: under another name, until it is complete.

Gathers the state dicts of a module and its optimizers from all ranks of a pipeline.

Gathers dictionaries from all pipeline ranks onto rank 0, in CPU memory.
"""

import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_hanayo.dist_checkpointing.load_state import Sharding
from lightning_hanayo.dist_checkpointing.state import WITHOUT_STATE
from lightning_hanayo.dist_checkpointing.target import (
    Storage,
    check_replaceable,
    problem_of,
    remove_next_to,
    temporary_path,
)
from lightning_hanayo.errors import CheckpointError, UnsupportedError
from lightning_hanayo.packed_values import from_bytes, is_tensor_subclass, to_bytes
from lightning_hanayo.partition.ownership import state_of_own_tensors
from lightning_hanayo.pipeline_parallel.transport import Transport


def is_zip(path: str | Path) -> bool:
    """Whether it is a file in torch's format, whole or damaged; before torch 1.6 it was another."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def load_mapped(path: str | Path, *, weights_only: bool | None) -> Any:
    """Return what the file holds; its tensors are views of the mapped file, which change no byte of it.

    Raises:
        CheckpointError: it holds objects that only code could rebuild, or can't be read.
    """
    with reading(path):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Inside it, a file that torch can't read is a CheckpointError, which names the classes that only code rebuilds."""
    try:
        yield
        return
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
    classes: list[str] = []
    with suppress(Exception):  # a file that isn't in torch's format, or is damaged; classes are read as names alone
        classes = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    if not classes:
        raise CheckpointError(f"{path} can't be read as a checkpoint: {reason}. Load another one.") from None
    names = ", ".join(one.rpartition(".")[2] for one in classes)
    raise CheckpointError(
        f"{path} holds objects of {', '.join(classes)}, which only code can rebuild. If you trust it, allow them, "
        f"torch.serialization.add_safe_globals([{names}]), or give the Trainer weights_only=False."
    ) from None


def write_file(path: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file that is the one of before until it is complete. One process calls it.

    A folder of that name, such as the checkpoint of several ranks, is replaced, too.

    Args:
        path: local, or an URL that fsspec knows. Folders above it are made.
        write: writes the content into an open file.

    Example:
        >>> write_file("last.ckpt", lambda file: torch.save(checkpoint, file))

    Raises:
        CheckpointError: it can't be written. What was there before is untouched, and nothing is left of the new file.
    """
    storage, save_id = Storage(path), secrets.token_hex(4)
    path = os.path.abspath(storage.path) if storage.is_local else path.rstrip("/")
    parent, _, name = path.rpartition("/")
    folder = Storage(parent + "/")  # with a slash: "/" and "memory://" are folders, too
    # next to it, on the same file system: a rename is at once
    new, old = temporary_path(name, "tmp", save_id), temporary_path(path, "old", save_id)
    is_folder = storage.is_local and storage.is_folder() and not os.path.islink(path)
    try:
        if is_folder:
            check_replaceable(storage)
        folder.make_folder()
        if folder.is_local:
            remove_next_to(path, "tmp")
        with folder.create(new) as file:
            write(file)
        if is_folder:
            os.rename(path, old)
        folder.replace(new, name)
        if folder.is_local:
            remove_next_to(path, "tmp", "old")
    except BaseException as error:
        with suppress(OSError):
            folder.remove(new)
            if os.path.isdir(old) and not os.path.lexists(path):
                os.rename(old, path)
        # torch's archive writer raises an error of its own instead
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError | CheckpointError):
            raise
        problem = problem_of(cause, path)
        raise CheckpointError(f"{path} was not saved: {problem}. What was there before is untouched.") from cause


def gather_module_state(
    module: nn.Module,
    ranks: Mapping[str, int],
    transport: Transport,
    sharding: Sharding | None = None,
    *,
    gathers: bool = True,
) -> dict[str, Any]:
    """The module's full state dict on pipeline rank 0, as a single process has it; elsewhere this rank's own entries.

    All ranks of the pipeline call this; with a sharding, all ranks that it is over.

    Args:
        module: with placeholders for the parameters of other ranks.
        ranks: the pipeline rank that owns each entry.
        transport: to the ranks of the pipeline.
        sharding: of the parameters; None if they are whole.
        gathers: False if another pipeline is the one whose rank 0 gets the state, and this one only gives its shards.
    """
    state = module.state_dict()
    own = {name: value for name, value in state.items() if ranks[name] == transport.rank}
    if sharding is not None:
        # under whatever name: hooks may have renamed entries
        renamed = {name: one for name, one in state_of_own_tensors(module).items() if isinstance(one, nn.Parameter)}
        parameters = {**renamed, **dict(module.named_parameters(remove_duplicate=False))}
        own |= {name: sharding.unshard(one, parameters[name]) for name, one in own.items() if name in parameters}
    if not gathers:
        return state
    gathered = gather(transport, own)
    if gathered is None:
        return own
    state.update(gathered)  # which keeps the versions of modules' entries, an attribute
    return state


def gather_optimizer_state(
    optimizer: Optimizer,
    transport: Transport,
    sharding: Sharding | None = None,
    *,
    gathers: bool = True,
    is_here: Callable[[Tensor], bool] = lambda parameter: not parameter.is_meta,
) -> dict[str, Any]:
    """The optimizer's full state dict on the transport's rank 0; elsewhere this rank's own. Called by all ranks.

    Other arguments as for `gather_module_state`.

    Args:
        is_here: whether a parameter's states are on this rank.

    Raises:
        UnsupportedError: it isn't known which states are whose.
    """
    state = numbered_state_dict(optimizer, is_cut=transport.num_ranks > 1 or sharding is not None)
    if not optimizer.param_groups:  # Lightning's, for `configure_optimizers` that returns None
        return state
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # some, such as Adagrad, make states of placeholders in their constructor
    own = {index: dict(values) for index, values in state["state"].items() if is_here(parameters[index])}
    for index, values in own.items():
        for name, value in values.items():
            if sharding is not None and isinstance(value, Tensor):
                values[name] = sharding.unshard(value, parameters[index])
    if not gathers:
        return state
    gathered = gather(transport, own)
    if gathered is not None:
        state["state"] = dict(sorted(gathered.items()))
        without = gathered and [index for index in range(len(parameters)) if index not in gathered]
        state |= {WITHOUT_STATE: without} if without else {}
    return state


def numbered_state_dict(optimizer: Optimizer, *, is_cut: bool) -> dict[str, Any]:
    """The optimizer's `state_dict()` on this rank, in which states have the numbers of their parameters.

    Args:
        optimizer: torch's, not Lightning's.
        is_cut: whether ranks have different parameters, or parts of them.

    Raises:
        UnsupportedError: states have other keys; or there are tensors next to them, such as the states of an optimizer
            inside this one, of which only rank 0's would be saved.
    """
    state: dict[str, Any] = optimizer.state_dict()
    if not optimizer.param_groups:
        return state
    name, number = type(optimizer).__name__, sum(len(group["params"]) for group in optimizer.param_groups)
    lacking = [key for key in ("state", "param_groups") if key not in state]
    strange = [key for key in state.get("state", ()) if not isinstance(key, int) or key >= number]
    if lacking or strange:
        what = f"lacks {lacking[0]!r}" if lacking else f"has {strange[0]!r} where torch's have numbers of parameters"
        raise UnsupportedError(
            f"the state_dict() of {name} {what}: it isn't known which states are whose. Let it return what torch's "
            f"do (around several: one.state = self.state), or save weights alone, with save_weights_only=True."
        )
    apart = [{key: value for key, value in state.items() if key not in ("state", "param_groups")}]
    apart += [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    # a tensor of a single element is a number, such as a learning rate
    lost = [key for entries in apart for key, value in entries.items()
            if is_cut and any(isinstance(leaf, Tensor) and leaf.numel() > 1
                              for leaf in tree_leaves(value))]  # fmt: skip
    if lost:
        raise UnsupportedError(
            f"the state_dict() of {name} has tensors under {lost[0]!r}, of which only rank 0's would be saved. Keep "
            f"them in self.state[parameter], or save weights alone, with save_weights_only=True."
        )
    return state


_TAG = 1


def gather(transport: Transport, entries: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """Rank 0 gets the entries of all ranks, in rank order; the others get None. Called by all ranks of the pipeline.

    An entry consists of tensors and plain values in dicts, lists and tuples. Entries are sent one at a time.
    """
    if transport.rank == 0:
        gathered: dict[Any, Any] = tree_map_only(Tensor, _on_host, dict(entries))
        for rank in range(1, transport.num_ranks):
            while (entry := _receive(transport, rank)) is not None:
                gathered.update([entry])
        return gathered
    for entry in (*entries.items(), None):
        data = to_bytes(tree_map_only(Tensor, _on_host, entry))
        for buffer in (torch.tensor([len(data)]).view(torch.uint8), data):
            transport.send(0, _TAG, buffer).wait()
    return None


def _receive(transport: Transport, rank: int) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    transport.receive(rank, _TAG, length.view(torch.uint8)).wait()
    data = torch.empty(int(length), dtype=torch.uint8)
    transport.receive(rank, _TAG, data).wait()
    return from_bytes(data)


def _on_host(value: Tensor) -> Tensor:
    """The tensor in CPU memory, without the rest of the memory of which it is a view."""
    if is_tensor_subclass(value):
        return value
    host = value.detach().cpu()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()
