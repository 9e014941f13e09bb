"""Gives closed forms of the idle time of every rank in a step; a step lasts B (T_F + T_B) + idle.

T_B is input plus weight gradient, F = I = W = 1 (so T_B = 2), messages free, B a multiple of P, P > 1.
"""

from fractions import Fraction

from recipes.paper.contender import Contender


def idle(contender: Contender, num_ranks: int, num_microbatches: int) -> Fraction | None:
    """The idle time in T_F, or None if no closed form is known."""
    others, groups = num_ranks - 1, num_microbatches // num_ranks
    match contender.name:
        case "gpipe" | "1f1b":
            return Fraction(3 * others)
        case "interleaved":
            return Fraction(3 * others, contender.num_stages_per_rank or 2)
        case "chimera":
            return Fraction(2 * (num_ranks - 2))
        case "hanayo":
            return Fraction(2 * others, contender.num_waves)
        case "zb-h1":
            return Fraction(others)
        case "interleaved-zb":
            return Fraction(others, contender.num_stages_per_rank or 2)
        case "zbv" if groups > 1:
            return Fraction(others, 2)
        case "hanayo-zb":
            return Fraction(others, 2 * contender.num_waves)
        case "v-half" if num_ranks > 2:
            return Fraction(3 * num_ranks - (4 if num_ranks % 2 else 7), 2)
        case "v-min" if num_ranks > 2:
            return Fraction(4 * num_ranks - 5, 2) - (1, 0, 2)[num_ranks % 3]
    return None


def bubble(contender: Contender, num_ranks: int, num_microbatches: int) -> float | None:
    """The idle time as a fraction of the step."""
    waits = idle(contender, num_ranks, num_microbatches)
    return None if waits is None else float(waits / (3 * num_microbatches + waits))
