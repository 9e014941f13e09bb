"""Budget: may a rank hold one more activation, so that every micro-batch already under way can still end?

A micro-batch needs room for all of a rank's stages before its backward frees any of it. So room is kept for the oldest
first, then the next, each counting on what the older ones give back:

    capacity 4, two stages per rank         held + still needed by m, and held by the younger
      m = 0 holds 1, needs 1                1 + 1 + 2 = 4    fits
      m = 1 holds 2                         2 + 0     = 2    fits;  one more for m = 2 would leave 0 no room: refused

The oldest can thus always go on, on every rank, and nobody ever waits for room forever.
"""


class Budget:
    """The activations that one rank holds, counted in stages, at most `capacity`."""

    __slots__ = ("_capacity", "_growing", "_held", "_held_by_grown", "_needed", "total")

    def __init__(self, capacity: int, num_stages: int, num_microbatches: int) -> None:
        self._capacity = capacity
        self._held = [0] * num_microbatches
        self._needed = [num_stages] * num_microbatches
        self.total = 0
        self._growing = 0
        self._held_by_grown = 0  # by the micro-batches before `_growing`, which have run all their forwards here

    def allows(self, microbatch: int) -> bool:
        """Whether the rank may run one more forward of `microbatch`."""
        room = self._capacity - self.total - 1
        if room < 0:
            return False
        room += self._held_by_grown
        for older in range(self._growing, microbatch):
            if self._needed[older] > room:
                return False
            room += self._held[older]
        return True

    def take(self, microbatch: int) -> None:
        """A forward of `microbatch` runs."""
        self.total += 1
        self._held[microbatch] += 1
        self._needed[microbatch] -= 1
        while self._growing < len(self._needed) and not self._needed[self._growing]:
            self._held_by_grown += self._held[self._growing]
            self._growing += 1

    def free(self, microbatch: int) -> None:
        """What ends an activation of `microbatch` (a `B` or `W`) runs."""
        self.total -= 1
        self._held[microbatch] -= 1
        if microbatch < self._growing:
            self._held_by_grown -= 1
