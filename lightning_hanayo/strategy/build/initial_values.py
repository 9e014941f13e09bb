"""The initial values of a model that was built on the meta device: made module by module, where they are needed.

alone     each pipeline rank builds the modules of its stages, one after another
a cube    module 0      1      2      3  |  4      5 ...        its ranks build one each at once, and deal them out:
          rank   0      1      2      3  |  0      1            each gets its parts of all, and whole ones are gone
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_hanayo.partition.deferred_init import DeferredInit, UnbuiltModule
from lightning_hanayo.strategy.build.cube import Cube


def give_values(blueprint: DeferredInit, modules: Iterable[nn.Module], device: torch.device, cube: Cube | None) -> None:
    """Fill what lies on meta in `modules`, this rank's, with its part of the values. Called by all ranks of the cube.

    A rank of a cube never holds more than one whole module, and what it is sending of it.
    """
    unbuilt = blueprint.unbuilt(modules)
    if cube is None:
        for module in unbuilt:
            blueprint.fill(module, (value.to(device) for value in blueprint.build(module)))
        return
    count = cube.grid.num_ranks
    for first in range(0, len(unbuilt), count):
        _deal(blueprint, unbuilt[first : first + count], device, cube)


def _deal(blueprint: DeferredInit, modules: Sequence[UnbuiltModule], device: torch.device, cube: Cube) -> None:
    """One module for each rank, or fewer."""
    axis = cube.grid.axis("xyz")
    assert axis.group is not None
    parts = [torch.empty(0, dtype=torch.uint8)] * axis.size
    if axis.place < len(modules):
        parts = _parts(blueprint, modules[axis.place], cube)
    sent, counts = torch.cat(parts).to(device), [len(part) for part in parts]
    del parts
    sizes = [sum(tensor.nbytes for tensor in module.tensors) for module in modules]  # on meta they are parts already
    sizes += [0] * (axis.size - len(modules))
    arrived = sent.new_empty(sum(sizes))
    axis.group.alltoall_base(arrived, sent, sizes, counts).wait()
    for module, own in zip(modules, arrived.split(sizes), strict=False):
        blueprint.fill(module, _values(own, module.tensors))


def _parts(blueprint: DeferredInit, module: UnbuiltModule, cube: Cube) -> list[Tensor]:
    """Each rank's of a module that is built here, as bytes: gloo knows few dtypes."""
    values = list(zip(module.tensors, blueprint.build(module), strict=True))
    return [
        torch.cat([cube.part(value, tensor, place).reshape(-1).view(torch.uint8) for tensor, value in values])
        for place in cube.places
    ]


def _values(message: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for tensor in tensors:
        part = message[start : start + tensor.nbytes].clone()  # where its dtype may begin
        start += tensor.nbytes
        yield part.view(tensor.dtype).view(tensor.shape)
