"""Gives closed forms for the length of a step and for the idle time in it. Tests compare each with the simulator.

`forward` and `backward` are T_F and T_B: one micro-batch through one rank's share. `message` is T_C, `B` is P; T_F is 1
by default. For the idle time T_B is input plus weight gradient, F = I = W = 1, messages free, B a multiple of P > 1:
a step lasts B (T_F + T_B) + idle.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.paper.contender import Contender


@dataclass(frozen=True)
class Times:
    """T_F, T_B, T_C."""

    forward: float = 1.0
    backward: float = 2.0
    message: float = 0.0

    @property
    def both(self) -> float:
        """T_F + T_B"""
        return self.forward + self.backward

    def on(self, num_ranks: int) -> "Times":
        """Convert times on 8 ranks to P ranks: a rank's share of the model grows, a message stays."""
        return Times(self.forward * 8 / num_ranks, self.backward * 8 / num_ranks, self.message)


def gpipe(num_ranks: int, times: Times) -> float:
    """GPipe, B = P."""
    return (2 * num_ranks - 1) * times.both + (2 * num_ranks - 2) * times.message


def dapple(num_ranks: int, times: Times) -> float:
    """1F1B (DAPPLE), B = P >= 2."""
    return (2 * num_ranks - 1) * times.both + (4 * num_ranks - 6) * times.message


def hanayo(num_ranks: int, num_waves: int, times: Times) -> float:
    """W waves, B = P >= 2: the schedule of the paper's Fig 3 and 6, op for op."""
    idle = (num_ranks - 1) * max(times.forward, times.backward) / num_waves
    hops = 4 * num_waves * (num_ranks - 1) + 2 * (num_ranks - 2)
    return num_ranks * times.both + idle + hops * times.message


def hanayo_printed_bubble(num_ranks: int, num_waves: int) -> float:
    """The paper's own bubble ratio at T_C = 0, T_B = 2 T_F. Its Eq. (1) has T_B/(2W) where the schedule has T_B/W."""
    return (2 * num_ranks - 2) / (3 * num_ranks * num_waves + num_ranks - 1)


def chimera_bubble(num_ranks: int, times: Times) -> float:
    """The paper's bubble ratio of Chimera, B = P even."""
    p, k = num_ranks, num_ranks**2 / 2 - num_ranks
    idle = (3 * k + 6 * p - 2 * k / p - 8) * times.message + 2 * k * times.backward
    whole = (3 * p**2 - 2 * p) * times.message + (2 * p**2 - 2 * p) * times.backward + p**2 * times.forward
    return idle / whole


def gems(num_ranks: int, times: Times) -> float:
    """GEMS, B = P, T_C = 0, T_B >= T_F, derived from `two_copies.gems`. It gives both of the paper's figures.

    P forwards, then P backwards per micro-batch, and one forward between two micro-batches.
    """
    p = num_ranks
    return p * times.forward + p * p * times.backward + (p - 1) * times.forward


def bubble(num_ranks: int, makespan: float, times: Times) -> float:
    """The fraction of all ranks' time in which they don't compute, B = P."""
    return 1 - num_ranks * times.both / makespan


def idle(contender: "Contender", num_ranks: int, num_microbatches: int) -> Fraction | None:
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


def idle_ratio(contender: "Contender", num_ranks: int, num_microbatches: int) -> float | None:
    """The idle time as a fraction of the step."""
    waits = idle(contender, num_ranks, num_microbatches)
    return None if waits is None else float(waits / (3 * num_microbatches + waits))
