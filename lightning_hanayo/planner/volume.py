"""The volume: how many elements a rank receives, and stores, when linear layers lie on a grid (arXiv 2105.14450).

Y = X W^T, X [M, K], W [N, K], M tokens of a micro-batch, over x * y * z = P ranks:

    forward    X gathered over y           W gathered over x         Y summed over z, a part kept
    backward   dX summed over y            dW summed over x          dY gathered over z
    each       (y-1) MK / P                (x-1) KN / P              (z-1) MN / P

A collective over g ranks brings each what the other g - 1 hold, as the ring algorithms do; over one rank, nothing.
Matrices only: biases and norms move a few numbers per token. Sizes that don't divide move as if they did, so what pads
them comes on top.
"""

from dataclasses import dataclass, fields
from typing import Literal

Grid = tuple[int, int, int]
"""the sizes of x, y and z"""
Keep = Literal["gathered", "shards"]
"""what a product saves for its backward: what it gathered, or this rank's own, gathered again"""


@dataclass(frozen=True)
class Volume:
    """Elements one rank receives, by collective.

    Example:
        >>> Linear(tokens=8, in_features=4, out_features=6).volume((2, 2, 1)).gather_x
        8.0
    """

    gather_x: float = 0.0
    gather_w: float = 0.0
    scatter_y: float = 0.0
    enter_x: float = 0.0
    """rows of all features exchanged for all rows of some, before a product in a block of unknown kind"""
    leave_y: float = 0.0
    """and back behind it"""
    gather_dy: float = 0.0
    scatter_dx: float = 0.0
    scatter_dw: float = 0.0
    regather_x: float = 0.0
    regather_w: float = 0.0
    enter_dy: float = 0.0
    leave_dx: float = 0.0

    @property
    def forward(self) -> float:
        """All that is received in the forward."""
        return self.gather_x + self.gather_w + self.scatter_y + self.enter_x + self.leave_y

    @property
    def backward(self) -> float:
        """All that is received in the backward."""
        return self.total - self.forward

    @property
    def total(self) -> float:
        """Forward and backward."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Storage:
    """Elements one rank holds between forward and backward."""

    weights: float = 0.0
    saved_inputs: float = 0.0
    saved_weights: float = 0.0
    """gathered ones; where nothing had to be gathered, what is saved is the parameter itself"""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.saved_inputs + self.saved_weights

    def __add__(self, other: "Storage") -> "Storage":
        return Storage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Linear:
    """A linear layer, or several that read one input (q, k, v): it is gathered once, so they count as one.

    Args:
        tokens: M, of one micro-batch.
        in_features: K.
        out_features: N, of all of them together.
        swapped: whether y and z have exchanged their roles, as in the second layer of a pair.
    """

    tokens: int
    in_features: int
    out_features: int
    swapped: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The elements of X, W and Y."""
        m, k, n = self.tokens, self.in_features, self.out_features
        return m * k, k * n, m * n

    @property
    def flops(self) -> float:
        """Of its three products, all ranks together."""
        return 6.0 * self.tokens * self.in_features * self.out_features

    def volume(self, grid: Grid, keep: Keep = "gathered") -> Volume:
        """What a rank receives for it: six collectives, eight if it keeps shards only."""
        x, y, z = self._axes(grid)
        of_x, of_w, of_y = self._shards(grid)
        in_x, in_w, in_y = (y - 1) * of_x, (x - 1) * of_w, (z - 1) * of_y
        again = keep == "shards"
        return Volume(
            gather_x=in_x,
            gather_w=in_w,
            scatter_y=in_y,
            gather_dy=in_y,
            scatter_dx=in_x,
            scatter_dw=in_w,
            regather_x=in_x * again,
            regather_w=in_w * again,
        )

    def rows_volume(self, grid: Grid, keep: Keep = "gathered") -> Volume:
        """The same in a block of unknown kind, whose ranks hold rows of all features: never swapped, and converted.

        At most 1/p more, on a cube of p.
        """
        _, y, z = grid
        of_x, _, of_y = self._shards(grid)
        enter, leave = of_x * (z - 1) / z, of_y * (y - 1) / y
        own = Linear(self.tokens, self.in_features, self.out_features).volume(grid, keep)
        return own + Volume(enter_x=enter, leave_y=leave, enter_dy=leave, leave_dx=enter)

    def storage(self, grid: Grid, keep: Keep = "gathered") -> Storage:
        """What a rank stores of it: of its matrix 1/P, of what is saved as `keep` says."""
        x, y, _ = self._axes(grid)
        of_x, of_w, _ = self._shards(grid)
        if keep == "shards":
            return Storage(of_w, of_x)
        return Storage(of_w, of_x * y, of_w * x if x > 1 else 0.0)

    def hops(self, grid: Grid, keep: Keep = "gathered") -> int:
        """How many messages its collectives take one after the other: a measure of latency."""
        x, y, z = self._axes(grid)
        again = keep == "shards"
        return (2 + again) * (x - 1 + y - 1) + 2 * (z - 1)

    def _axes(self, grid: Grid) -> Grid:
        x, y, z = grid
        return (x, z, y) if self.swapped else grid

    def _shards(self, grid: Grid) -> tuple[float, float, float]:
        """A rank's part of X, W and Y."""
        x, y, z = grid
        of_x, of_w, of_y = (size / (x * y * z) for size in self.sizes)
        return of_x, of_w, of_y


@dataclass(frozen=True)
class TransformerLayer:
    """Attention and a feed-forward network: q, k, v | out | up | down, each second linear layer swapped.

    Args:
        tokens: M, of one micro-batch.
        hidden: h.
        heads: of attention.
        feed_forward: the network's features, in h.
    """

    tokens: int
    hidden: int
    heads: int
    feed_forward: float = 4.0

    @property
    def features(self) -> int:
        """Of the feed-forward network."""
        return round(self.feed_forward * self.hidden)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers, in order."""
        m, h, f = self.tokens, self.hidden, self.features
        return Linear(m, h, 3 * h), Linear(m, h, h, swapped=True), Linear(m, h, f), Linear(m, f, h, swapped=True)

    @property
    def flops(self) -> float:
        """Of its linear layers, forward and backward, all ranks together; attention's own products aren't counted."""
        return sum(linear.flops for linear in self.linears)

    def volume(self, grid: Grid, keep: Keep = "gathered") -> Volume:
        """What a rank receives for it: attention itself needs nothing, since each rank has whole heads."""
        return sum((linear.volume(grid, keep) for linear in self.linears), Volume())

    def rows_volume(self, grid: Grid, keep: Keep = "gathered") -> Volume:
        """The same for a block of unknown kind, each linear layer of which converts by itself."""
        return sum((linear.rows_volume(grid, keep) for linear in self.linears), Volume())

    def storage(self, grid: Grid, keep: Keep = "gathered") -> Storage:
        """What a rank stores of its linear layers."""
        return sum((linear.storage(grid, keep) for linear in self.linears), Storage())

    def hops(self, grid: Grid, keep: Keep = "gathered") -> int:
        """How many messages follow each other."""
        return sum(linear.hops(grid, keep) for linear in self.linears)


def stack_ends(tokens: int, hidden: int, grid: Grid, split: Literal["sequence", "batch"] = "sequence") -> float:
    """Elements a rank receives where the stack is entered and left, forward and backward: 4 (Mh/P) (n-1)/n.

    n ranks exchange samples for parts of them: those along z, and along y too where the sequence is split.
    """
    x, y, z = grid
    n = y * z if split == "sequence" else z
    return 4 * tokens * hidden / (x * y * z) * (n - 1) / n
