"""Checks that all ranks of a mesh call the same layers in the same order, as the collectives of a layer need all ranks.

rank 0    experts[0]   experts[2]   end          each call begins with the maximum over all ranks of n and of -n, where
rank 1    experts[0]   experts[1]   ...          n is the layer's number: in the second column 3 and -2, two layers

Without the check they would wait for each other, or gather parts of two weights as if they were one.
"""

from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.tensor3d.mesh import Mesh

END = 0
"""the number in place of a layer's where a stage's blocks end"""


class CallOrder:
    """Of the layers of one stage that user code calls, on the ranks of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._layers: list[nn.Module] = []

    def add(self, layer: nn.Module) -> int:
        """Returns the layer's number. All ranks add the same layers in the same order."""
        self._layers.append(layer)
        return len(self._layers)

    @property
    def num_layers(self) -> int:
        """How many were added."""
        return len(self._layers)

    def check(self, number: int, count: int = 0) -> int:
        """This rank calls the layer `number`, or ends the last block. Returns the largest `count` of all ranks.

        Raises:
            UnsupportedError: another rank calls another layer.
        """
        highest, lowest, largest = self._mesh.largest([number, -number, count])
        if highest != -lowest:
            raise UnsupportedError(self._message(number, highest if highest != number else -lowest))
        return largest

    def _message(self, own: int, other: int) -> str:
        layer = self._name(own if own != END else other)
        words = [word for word in layer.split(".") if not word.isdigit()]
        return (
            f"this rank {self._describe(own)}, while another rank of its cube {self._describe(other)}. The ranks of a "
            f"cube run a block on different samples, and must call the same linear layers in the same order. Leave "
            f"those out that some samples skip: HanayoStrategy(cube_exclude=({words[-1]!r},))."
        )

    def _describe(self, number: int) -> str:
        return "calls no further layer" if number == END else f"calls {self._name(number)}"

    def _name(self, number: int) -> str:
        part = getattr(self._parameter(number), "_part", None)
        return f"layer {number}" if part is None else str(part.name).rpartition(".")[0]

    def _parameter(self, number: int) -> nn.Parameter:
        parameter = self._layers[number - 1]._parameters["weight"]
        assert parameter is not None
        return parameter
