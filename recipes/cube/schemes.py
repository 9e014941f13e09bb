"""Communication volume of other kinds of tensor parallelism: 1-D (Megatron), 2-D (SUMMA) and 2.5-D.

For each what a rank receives for a Transformer layer, forward and backward, in elements.
"""

from dataclasses import dataclass

from recipes.cube.meshes import TransformerLayer


@dataclass(frozen=True)
class OneD:
    """Megatron's column-parallel and row-parallel layers; behind each such pair, Mh is summed over P ranks."""

    num_ranks: int

    def volume(self, layer: TransformerLayer) -> float:
        """Returns 4 (P-1)/P Mh for each of the two pairs."""
        return 2 * 4 * (self.num_ranks - 1) / self.num_ranks * layer.tokens * layer.hidden


@dataclass(frozen=True)
class TwoAndAHalfD:
    """`depth` squares of `side` x `side` ranks, each of which computes a part of the tokens by SUMMA."""

    side: int
    depth: int

    def volume(self, layer: TransformerLayer) -> float:
        """Returns 3 (q-1)/q^2 (MK/d + KN) + 2 (d-1)/d KN/q^2 for each linear layer."""
        q, d = self.side, self.depth
        total = 0.0
        for x, w, _ in (linear.sizes for linear in layer.linears):
            total += 3 * (q - 1) / q**2 * (x / d + w) + 2 * (d - 1) / d * w / q**2
        return total


def two_d(side: int) -> TwoAndAHalfD:
    """Returns SUMMA on one square of `side` x `side` ranks: 3 (q-1)/q^2 (MK + KN) for each linear layer."""
    return TwoAndAHalfD(side, 1)
