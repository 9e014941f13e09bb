"""Communication volume and storage: how many elements a rank of a mesh receives and stores for linear layers.

Y = X W^T, X [M, K], W [N, K], M tokens of a micro-batch, over x * y * z = P ranks (arXiv 2105.14450):

    forward    X all-gathered over y       W all-gathered over x       Y reduce-scattered over z
    backward   dX reduce-scattered over y  dW reduce-scattered over x  dY all-gathered over z
    each       (y-1) MK / P                (x-1) KN / P                (z-1) MN / P

By a collective over g ranks each receives what the other g - 1 hold, as in a ring. Only matrices are counted: biases
and norms communicate a few numbers per token. Sizes that don't divide are counted without their padding.
"""

from dataclasses import dataclass, replace
from math import comb, prod
from operator import add
from typing import Literal, Self

from lightning_hanayo.divisibility import MeshSizes

CubeWeights = Literal["microbatch", "batch"]
"""how often weights are gathered along x, and their gradients reduce-scattered: once in each"""


CubeOutside = Literal["share", "replicate", "tokens"]
"""what a cube's ranks get of a micro-batch outside the stack: samples of their own; all; all, and a part of the loss"""


class _Elements:
    """Adds up dataclasses of numbers."""

    @property
    def total(self) -> float:
        """Elements of all kinds."""
        return float(sum(vars(self).values()))

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Volume(_Elements):
    """Elements that one rank receives, by collective: `gather_x` in the all-gather of X, and so on.

    Example:
        >>> LinearLayer(tokens=8, in_features=4, out_features=6).volume((2, 2, 1)).gather_x
        8.0
    """

    gather_x: float = 0.0
    gather_w: float = 0.0
    scatter_y: float = 0.0
    exchange_x: float = 0.0
    """a generic block's all-to-all before a product: own tokens for a part of the features of more tokens"""
    exchange_y: float = 0.0
    """the all-to-all behind it"""
    gather_dy: float = 0.0
    scatter_dx: float = 0.0
    scatter_dw: float = 0.0
    exchange_dy: float = 0.0
    exchange_dx: float = 0.0

    @property
    def forward(self) -> float:
        """Elements received in the forward."""
        return self.gather_x + self.gather_w + self.scatter_y + self.exchange_x + self.exchange_y

    @property
    def backward(self) -> float:
        """Elements received in the backward."""
        return self.total - self.forward


@dataclass(frozen=True)
class Storage(_Elements):
    """Elements that one rank stores between forward and backward."""

    weights: float = 0.0
    saved_inputs: float = 0.0
    saved_weights: float = 0.0
    """gathered weights; 0 where nothing had to be gathered, because the parameter itself is saved"""


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer, or several that share their input (q, k, v), which count as one since it is gathered once.

    Args:
        tokens: M, the tokens of one micro-batch.
        in_features: K.
        out_features: N, of all of them together.
        row_parallel: whether y and z trade roles, as in the layer that leads back to the residual stream.
        is_generic: whether its block isn't registered, so that the layer is parallelized by itself: either activations
            are exchanged around it, or the weight is gathered whole, whichever communicates less.
    """

    tokens: int
    in_features: int
    out_features: int
    row_parallel: bool = False
    is_generic: bool = False

    def of(self, samples: int) -> Self:
        """The layer for so many times as many tokens."""
        return replace(self, tokens=samples * self.tokens)

    @property
    def flops(self) -> float:
        """Of the forward."""
        return 2.0 * self.tokens * self.parameters

    @property
    def parameters(self) -> int:
        """Of the weight."""
        return self.in_features * self.out_features

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of elements of X, W and Y."""
        m, k, n = self.tokens, self.in_features, self.out_features
        return m * k, k * n, m * n

    def volume(self, mesh: MeshSizes) -> Volume:
        """Returns what a rank receives, in six collectives."""
        if self.gathers_whole(mesh):
            return self._whole(mesh)
        if self.is_generic:
            return self.generic_volume(mesh)
        x, y, z = self._axes(mesh)
        of_x, of_w, of_y = self._shards(mesh)
        in_x, in_w, in_y = (y - 1) * of_x, (x - 1) * of_w, (z - 1) * of_y
        return Volume(gather_x=in_x, gather_w=in_w, scatter_y=in_y, gather_dy=in_y, scatter_dx=in_x, scatter_dw=in_w)

    def generic_volume(self, mesh: MeshSizes) -> Volume:
        """Returns what a rank receives in a generic block, where activations are exchanged around each product.

        On a p x p x p mesh this is at most 1/p more than `volume`.
        """
        _, y, z = mesh
        of_x, _, of_y = self._shards(mesh)
        before, after = of_x * (z - 1) / z, of_y * (y - 1) / y
        own = LinearLayer(self.tokens, self.in_features, self.out_features).volume(mesh)
        return own + Volume(exchange_x=before, exchange_y=after, exchange_dy=after, exchange_dx=before)

    def storage(self, mesh: MeshSizes) -> Storage:
        """Returns what a rank stores: 1/P of the matrix, and what was gathered."""
        x, y, _ = self._axes(mesh)
        of_x, of_w, _ = self._shards(mesh)
        if self.gathers_whole(mesh):
            return Storage(of_w, of_x, self.parameters if prod(mesh) > 1 else 0.0)
        return Storage(of_w, of_x * y, of_w * x if x > 1 else 0.0)

    def gathers_whole(self, mesh: MeshSizes) -> bool:
        """Whether its weight is gathered whole over all ranks, and no activation is sent."""
        return self.is_generic and self._whole(mesh).total <= self.generic_volume(mesh).total

    def _whole(self, mesh: MeshSizes) -> Volume:
        others = self.parameters * (1 - 1 / prod(mesh))
        return Volume(gather_w=others, scatter_dw=others)

    def _axes(self, mesh: MeshSizes) -> MeshSizes:
        x, y, z = mesh
        return (x, z, y) if self.row_parallel else mesh

    def _shards(self, mesh: MeshSizes) -> tuple[float, float, float]:
        """Returns the elements of a rank's shards of X, W and Y."""
        x, y, z = mesh
        of_x, of_w, of_y = (size / (x * y * z) for size in self.sizes)
        return of_x, of_w, of_y


Experts = Literal["whole", "cube"]
"""where experts are while a batch runs: all of a block's on each rank of its cube, or shared over y and z"""


@dataclass(frozen=True)
class ExpertLayer:
    """E experts that the n = y z ranks of a plane can share, replicated over x, for one sample.

    A token is sent once to each rank that has one of its k experts, and comes back summed. With even choices it has
    none on a rank of m = E / n experts with probability q = C(E - m, k) / C(E, k): a rank with M / P tokens receives

        all-to-all                       (n-1) (1-q) M h / P    four times: tokens and outputs, and both gradients
        all-gather, reduce-scatter       (n-1) M h / P          four times

    Args:
        tokens: M, of one sample.
        features: h, of a token.
        num_experts: E.
        chosen: k, the experts of each token.
        parameters: elements of all experts.
        flops: of the forward.
        saved: bytes that the forward keeps for the backward, besides parameters.
        dtype: of the products, which autocast may leave in fp32; empty: that of the model's other products.
    """

    tokens: int
    features: int
    num_experts: int
    chosen: int
    parameters: int
    flops: float = 0.0
    saved: float = 0.0
    dtype: str = ""

    def of_a_rank(self, mesh: MeshSizes) -> int:
        """Returns the most experts that a rank has."""
        return -(-self.num_experts // (mesh[1] * mesh[2]))

    def sent(self, mesh: MeshSizes) -> float:
        """Returns the elements that a rank receives one way: of four ways in a forward and a backward."""
        x, y, z = mesh
        own, others = self.of_a_rank(mesh), min(y * z, self.num_experts) - 1
        missed = comb(self.num_experts - own, self.chosen) / comb(self.num_experts, self.chosen)
        return others * (1 - missed) * self.tokens * self.features / (x * y * z)

    def parameters_of_a_rank(self, mesh: MeshSizes) -> float:
        """Returns the elements of its experts."""
        return self.parameters * self.of_a_rank(mesh) / self.num_experts

    def most_saved(self, mesh: MeshSizes) -> float:
        """Returns the bytes that a rank keeps in the worst case, if all tokens of its plane choose its experts."""
        return self.saved / mesh[0] * min(self.of_a_rank(mesh), self.chosen) / self.chosen
