"""The machine: how long flops and received elements take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One rank of many like it.

    Args:
        flops_per_second: of one rank.
        bytes_per_second: that one rank receives.
        bytes_per_element: of what travels.
        seconds_per_hop: how long a message takes, however small.

    Example:
        >>> Machine(flops_per_second=1e12, bytes_per_second=1e9).step_seconds(flops=1e12, elements=5e8)
        3.0
    """

    flops_per_second: float
    bytes_per_second: float
    bytes_per_element: int = 4
    seconds_per_hop: float = 0.0

    def step_seconds(self, *, flops: float, elements: float, hops: int = 0, overlap: bool = False) -> float:
        """One after the other, or, where they overlap, as long as the longer one. All figures are one rank's."""
        computing = flops / self.flops_per_second
        receiving = elements * self.bytes_per_element / self.bytes_per_second + hops * self.seconds_per_hop
        return max(computing, receiving) if overlap else computing + receiving
