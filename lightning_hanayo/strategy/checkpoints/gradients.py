"""Gradients that have been added up since the last optimizer step, by name, as they are before the sum over ranks.

    data rank 0     gradient/0/head.weight        each data rank has a sum over its own batches; in a cube there may be
    data rank 1     gradient/1/head.weight        one for each rank along the axes over which it is still partial

Of as many ranks each gets its own back, so that later sums are the same to the last bit. Else all are added up on as
many ranks as there are: 4 read by 2 are 0 + 2 and 1 + 3.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.checkpoint.format.region import Region
from lightning_hanayo.checkpoint.save.part import TensorPart
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.weight_gradients import gradient_dtype

PREFIX = "gradient/"
_NAME = re.compile(r"gradient/[0-9]{1,9}/.")

Read = Callable[[str, Region], Tensor]
"""reads a region of a tensor by its name"""


class AccumulatedGradients:
    """The gradients of one rank between two batches.

    Args:
        parameters: the module's, by name; placeholders too.
        cube: None without one.
        data_rank: this rank's.
        num_data: the number of data ranks.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], cube: Cube | None, data_rank: int, num_data: int
    ) -> None:
        self._parameters = {name: one for name, one in parameters.items() if not one.is_meta and one.requires_grad}
        self._cube = cube
        self._data_rank = data_rank
        self._num_data = num_data

    def parts(self) -> Iterator[TensorPart]:
        """What this rank writes of them: what no other rank has, or has written."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and self._writes(parameter):
                shape, region = self._place(parameter)
                number, _ = self._number(parameter)
                yield TensorPart(f"{PREFIX}{number}/{name}", parameter.grad.detach(), shape, region, "optimizer")

    def restore(self, names: Collection[str], read: Read) -> None:
        """Set the gradients to what was saved. `names` are those of all tensors of the checkpoint."""
        saved = _numbers_by_parameter(names)
        for name, parameter in self._parameters.items():
            number, count = self._number(parameter)
            own = [one for one in saved.get(name, ()) if one % count == number]
            if own:
                _, region = self._place(parameter)
                parameter.grad = self._sum(parameter, (read(f"{PREFIX}{one}/{name}", region) for one in own))

    @staticmethod
    def _sum(parameter: nn.Parameter, parts: Iterable[Tensor]) -> Tensor:
        options: Any = {"device": parameter.device, "dtype": gradient_dtype(parameter)}
        total: Tensor | None = None
        for part in parts:
            total = part.to(**options) if total is None else total.add_(part.to(**options))
        assert total is not None
        return torch.empty_like(parameter, dtype=options["dtype"]).copy_(total)  # with the parameter's strides

    def _number(self, parameter: nn.Parameter) -> tuple[int, int]:
        """This rank's number among those whose gradients are summed before a step, and how many there are."""
        if self._cube is None:
            return self._data_rank, self._num_data
        mesh, axes = self._cube.mesh, self._cube.partial_axes(parameter)
        return self._data_rank * mesh.size(axes) + mesh.index(axes), self._num_data * mesh.size(axes)

    def _place(self, parameter: nn.Parameter) -> tuple[tuple[int, ...], Region]:
        """The shape of the whole parameter, and this rank's entries."""
        if self._cube is None:
            return tuple(parameter.shape), Region.whole(parameter.shape)
        return self._cube.whole_shapes.get(parameter, tuple(parameter.shape)), self._cube.region(parameter)

    def _writes(self, parameter: nn.Parameter) -> bool:
        """Whether this is the first of the ranks that have the same gradient."""
        if self._cube is None:
            return True
        differing = self._cube.sharded_axes(parameter) + self._cube.partial_axes(parameter)
        return self._cube.mesh.index("".join(axis for axis in "xyz" if axis not in differing)) == 0


def _numbers_by_parameter(names: Collection[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for full_name in names:
        if _NAME.match(full_name):
            number, _, name = full_name.removeprefix(PREFIX).partition("/")
            found.setdefault(name, []).append(int(number))
    return {name: sorted(numbers) for name, numbers in found.items()}
