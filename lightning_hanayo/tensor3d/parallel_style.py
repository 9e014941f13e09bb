"""The layout: along which axis a linear layer's input is brought together, and along which its output is spread.

            input                             output                            stored
sequence    [batch/x, seq/y, K/z]             [batch/x, seq, N/(y z)]           W: [N/(y x), K/z]
swapped     [batch/x, seq, K/(y z)]           [batch/x, seq/y, N/z]             W: [N/(z x), K/y]

batch       [batch/(x y), seq, K/z]           [batch/(x z), seq, N/y]
swapped     [batch/(x z), seq, K/y]           [batch/(x y), seq, N/z]

A layout is a value: swapping it is how the next linear layer leads back to where the first one began. Paper: section
3.1; the sequence form and the orientation of W are ours.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AxisCollective:
    """One collective: the ranks of `axis` hold, or get, parts of dimension `dim`.

    Parts of a sequence may be padded: its true length is known where it is brought together.
    """

    axis: str
    dim: int
    is_sequence: bool = False


@dataclass(frozen=True)
class ParallelStyle:
    """`gather`: of the input's parts; `scatter`: of the output's partial sums."""

    gather: AxisCollective
    scatter: AxisCollective

    def swapped(self) -> "ParallelStyle":
        """The layout of the linear layer that follows."""
        return ParallelStyle(self.scatter, self.gather)

    @property
    def rows(self) -> str:
        """The axes that the weight's out-features lie along, in order."""
        return self.gather.axis + "x"

    @property
    def columns(self) -> str:
        """The axis that the weight's in-features lie along."""
        return self.scatter.axis


SEQUENCE = ParallelStyle(AxisCollective("y", 1, is_sequence=True), AxisCollective("z", -1))
"""the residual stream is cut over batch, sequence and features"""

SEQUENCE_FIRST = ParallelStyle(AxisCollective("y", 0, is_sequence=True), AxisCollective("z", -1))
"""the same for [seq, batch, features]"""

BATCH = ParallelStyle(AxisCollective("y", 0), AxisCollective("z", 0))
"""the residual stream is cut over batch (twice) and features: the paper's"""

ROWS = ParallelStyle(AxisCollective("y", 1), AxisCollective("z", 0))
"""inside a block of unknown kind: rows [z, m, K/z] of all ranks, on their way to [y, m, N/y]"""
