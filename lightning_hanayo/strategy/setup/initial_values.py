"""Gives values to a model that was built on the meta device, module by module, on the ranks that need them.

no cube   each pipeline rank builds the modules of its stages, one after another
a cube    module 0      1      2      3  |  4      5 ...        its ranks build one each at the same time, and send
          rank   0      1      2      3  |  0      1            every rank its shards; then the whole ones are freed
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from lightning_hanayo.monitor.hangs.waiting import Waiting
from lightning_hanayo.partition.deferred_init import DeferredInit, DeferredModule
from lightning_hanayo.strategy.setup.cube import Cube


def fill_initial_values(
    deferred: DeferredInit, modules: Iterable[nn.Module], device: torch.device, cube: Cube | None
) -> None:
    """Fill what is on meta in `modules`, this rank's, with its shards of the values. Called by all ranks of the cube.

    A rank of a cube never holds more than one whole module, and what it is sending of it.
    """
    unbuilt = deferred.deferred_modules(modules)
    if cube is None:
        for module in unbuilt:
            deferred.assign(module, (value.to(device) for value in deferred.initial_values(module)))
        return
    count = cube.mesh.num_ranks
    for first in range(0, len(unbuilt), count):
        _build_and_distribute(deferred, unbuilt[first : first + count], device, cube)


def make_room(
    deferred: DeferredInit, model: nn.Module, modules: Iterable[nn.Module], names: Collection[str], device: torch.device
) -> None:
    """Give memory to what is on meta in `modules`, this rank's, and has one of the names: its values are read later."""
    own = {tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())}
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if name in names and tensor in own and tensor.is_meta:
            deferred.assign_one(tensor, torch.empty_like(tensor, device=device))


def _build_and_distribute(
    deferred: DeferredInit, modules: Sequence[DeferredModule], device: torch.device, cube: Cube
) -> None:
    """Each rank builds one of `modules`; there may be fewer modules than ranks."""
    axis = cube.mesh.axis("xyz")
    assert axis.group is not None  # a cube has at least two ranks
    parts = [torch.empty(0, dtype=torch.uint8)] * axis.size
    if axis.rank < len(modules):
        parts = _shards_as_bytes(deferred, modules[axis.rank], cube)
    sent, counts = torch.cat(parts).to(device), [len(part) for part in parts]
    del parts
    sizes = [sum(tensor.nbytes for tensor in module.tensors) for module in modules]  # on meta they are shards already
    sizes += [0] * (axis.size - len(modules))
    received = sent.new_empty(sum(sizes))
    with Waiting("initial values from the ranks of its cube", axis.ranks):
        axis.group.alltoall_base(received, sent, sizes, counts).wait()
    for module, own in zip(modules, received.split(sizes), strict=False):
        deferred.assign(module, _values(own, module.tensors))


def _shards_as_bytes(deferred: DeferredInit, module: DeferredModule, cube: Cube) -> list[Tensor]:
    """Build a module here; return each rank's shards of it, as bytes: gloo knows few dtypes."""
    values = list(zip(module.tensors, deferred.initial_values(module), strict=True))
    return [
        torch.cat([cube.shard(value, tensor, place).reshape(-1).view(torch.uint8) for tensor, value in values])
        for place in cube.mesh.places
    ]


def _values(message: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for tensor in tensors:
        part = message[start : start + tensor.nbytes].clone()  # aligned for its dtype
        start += tensor.nbytes
        yield part.view(tensor.dtype).view(tensor.shape)
