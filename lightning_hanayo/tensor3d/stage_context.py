"""The setting: what the 3-D layers of one stage share."""

from dataclasses import dataclass, field
from typing import Any

from lightning_hanayo.tensor3d.layers.product import Along, Keep
from lightning_hanayo.tensor3d.layers.weight import LateSums, Order
from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.parallel_style import AxisCollective
from lightning_hanayo.weight_gradients import WeightGradients


@dataclass
class StageContext:
    """Given to each layer's constructor.

    Args:
        grid: the ranks that hold the stage together.
        keep: what products save for the backward.
        queue: takes weight gradients while the stage's backward is split; None: it never is.
        num_pieces: in how many a product is played, so that what travels and what is computed overlap.
        length: of the sequences under way; None where they aren't padded. Set before each micro-batch.
    """

    grid: Mesh
    keep: Keep = "gathered"
    queue: WeightGradients | None = None
    length: int | None = None
    num_pieces: int = 1
    late: LateSums = field(default_factory=LateSums)
    order: Order = field(default_factory=Order)

    def __deepcopy__(self, memo: Any) -> "StageContext":
        return self  # shared, and groups have no copies

    def along(self, side: AxisCollective) -> Along:
        """The collective of `side`, in this stage's grid and for the sequences under way."""
        return Along(self.grid.axis(side.axis), side.dim, self.length if side.is_sequence else None)
