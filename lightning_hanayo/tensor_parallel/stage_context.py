"""The context that all 3-D layers of one pipeline stage share."""

from typing import Any

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.overlap.turns import DeviceTurns
from lightning_hanayo.tensor_parallel import weights
from lightning_hanayo.tensor_parallel.collectives import CallOrder
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis
from lightning_hanayo.tensor_parallel.product import (
    AxisCollective,
    BoundCollective,
    Keep,
    SequenceParts,
    sequence_parts,
)
from lightning_hanayo.weight_gradients import WeightGradients


class StageContext(weights.StageWeights):
    """Given to the constructor of each layer. The runtime calls it around batches and actions, as its `NoHooks`.

    The lengths of sequences are the one thing here that changes between runs. An all-gather needs them to drop the
    padding. The stage has them as an argument, but the layers are called by the user's own block code, which can't pass
    them on, so they read them here. A layer's backward uses those of its own forward; the hook before the backward is
    for layers that are recomputed in it (activation checkpointing).

    Example:
        >>> context = StageContext(Mesh.single())
        >>> linear = Linear3D(64, 256, context=context)

    Args:
        mesh: the ranks that hold the stage together.
        keep: tensors that products save for the backward: "gathered" ones, or "shards", which are gathered again.
        queue: takes weight gradients while the stage's backward is split; None: it never is.
        num_pieces: in how many pieces a product runs, so that communication overlaps compute.
        sequence_length: of all sequences, for a model that runs without stages, or the different ones; None if y
            divides them.
        turns: which of two actions runs now, each with lengths of sequences and a place in the order of weights; None:
            there is one at a time.
        keep_weights: whether weights are gathered, and their gradients reduce-scattered, once a batch.
    """

    def __init__(
        self,
        mesh: Mesh,
        keep: Keep = "gathered",
        queue: WeightGradients | None = None,
        *,
        num_pieces: int = 1,
        sequence_length: int | tuple[int, ...] | None = None,
        turns: DeviceTurns | None = None,
        keep_weights: bool = False,
    ) -> None:
        super().__init__(queue, DeviceTurns() if turns is None else turns, keep_weights)
        self._mesh = mesh
        self.has_pairs = turns is not None
        """whether two actions may run at once: then each must start the same collectives on all ranks"""
        self.closed = ""
        """why layers refuse all calls between runs; empty during one"""
        self.keep: Keep = keep
        self.num_pieces = num_pieces
        lengths = (sequence_length,) if isinstance(sequence_length, int) else sequence_length or ()
        self._sequence_parts = [sequence_parts(lengths, mesh.size("y"))] * 2
        self.call_order = CallOrder(mesh)

    def __deepcopy__(self, memo: Any) -> "StageContext":
        return self  # copies of a layer share it, and process groups can't be copied

    @property
    def mesh(self) -> Mesh:
        """The ranks that hold the stage together.

        Raises:
            UnsupportedError: the run has ended, and other ranks may not run these layers.
        """
        if self.closed:
            raise UnsupportedError(self.closed)
        return self._mesh

    @property
    def sequence_parts(self) -> SequenceParts | None:
        """Of the action that runs now; None if nothing is known of its sequences, which then need no padding."""
        return self._sequence_parts[self.turns.slot]

    def bind(self, collective: AxisCollective) -> BoundCollective:
        """Returns the collective over this mesh's ranks, for sequences of the lengths that the stage runs now."""
        parts, mesh = self.sequence_parts if collective.is_sequence else None, self.mesh
        axis = mesh.axis(collective.axis) if collective.axis else MeshAxis(None, 1, 0)
        return BoundCollective(axis, collective.dim, parts)

    def weight(self, *parts: weights.StoredWeight, axis: str = "x") -> weights.ShardedWeight:
        """Returns the weight of a layer, or those of several layers that read one input, gathered along `axis`."""
        return weights.ShardedWeight(parts, self.mesh.axis(axis), self)

    def before_forward(self, *sequence_lengths: int) -> None:
        """The stage's forward runs next, on sequences of these lengths; none if no all-gather needs them."""
        self._sequence_parts[self.turns.slot] = sequence_parts(sequence_lengths, self._mesh.size("y"))
        self.prefetch_order.begin()

    def before_backward(self, *sequence_lengths: int) -> None:
        """The stage's backward runs next, with the lengths that its forward had."""
        self._sequence_parts[self.turns.slot] = sequence_parts(sequence_lengths, self._mesh.size("y"))
        self.prefetch_order.begin(recomputes=True)
