"""How a linear layer is parallelized: which axis gathers its input, and which one sums its output.

                         input                       output                        stored
sequence, column-        [batch/x, seq/y, K/z]       [batch/x, seq, N/(y z)]       W: [N/(y x), K/z]
sequence, row-parallel   [batch/x, seq, K/(y z)]     [batch/x, seq/y, N/z]         W: [N/(z x), K/y]

batch, column-           [batch/(x y), seq, K/z]     [batch/(x z), seq, N/y]
batch, row-parallel      [batch/(x z), seq, K/y]     [batch/(x y), seq, N/z]

A column-parallel layer leads from the residual stream to sharded heads or inner features, a row-parallel layer leads
back, as in Megatron. What 3-D parallelism changes: the input is sharded too, along y and z, and the weight also along
x. Both layers all-gather their input and reduce-scatter their output; y and z trade roles between them.

Source: arXiv 2105.14450, section 3.1. Its layout is `BATCH`; sharding the sequence, and the orientation of W, are ours.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AxisCollective:
    """A collective over the ranks of `axis`, which hold, or get, parts of dimension `dim`.

    The parts of a sequence may be padded. The all-gather of such parts drops the padding.
    """

    axis: str
    dim: int
    is_sequence: bool = False


@dataclass(frozen=True)
class ParallelStyle:
    """The two collectives of a linear layer.

    Args:
        all_gather: of the input's parts.
        reduce_scatter: of the output's partial sums.
    """

    all_gather: AxisCollective
    reduce_scatter: AxisCollective

    def row_parallel(self) -> "ParallelStyle":
        """Returns the style of the row-parallel layer that leads back to where this column-parallel one began."""
        return ParallelStyle(self.reduce_scatter, self.all_gather)

    @property
    def out_axes(self) -> str:
        """The axes that the weight's out-features are sharded over, in order."""
        return self.all_gather.axis + "x"

    @property
    def in_axes(self) -> str:
        """The axis that the weight's in-features are sharded over."""
        return self.reduce_scatter.axis

    @property
    def between_axes(self) -> str:
        """The axes that the output's features are sharded over: a bias's, and the heads of q, k and v."""
        return self.all_gather.axis + (self.reduce_scatter.axis if self.reduce_scatter.dim == -1 else "")

    @property
    def replicated_axes(self) -> str:
        """The other axes, over which a bias's gradient is a partial sum."""
        return "".join(axis for axis in "xyz" if axis not in self.between_axes)


SEQUENCE = ParallelStyle(AxisCollective("y", 1, is_sequence=True), AxisCollective("z", -1))
"""column-parallel; the residual stream is sharded over batch, sequence and features"""

SEQUENCE_FIRST = ParallelStyle(AxisCollective("y", 0, is_sequence=True), AxisCollective("z", -1))
"""the same for [seq, batch, features]"""

BATCH = ParallelStyle(AxisCollective("y", 0), AxisCollective("z", 0))
"""column-parallel; the residual stream is sharded over batch (twice) and features, as in the paper"""

EXCHANGED_TOKENS = ParallelStyle(AxisCollective("y", 1), AxisCollective("z", 0))
"""in a generic block: tokens [z, m, K/z] of all ranks, on their way to [y, m, N/y]"""
