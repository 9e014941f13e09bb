"""The activations that a rank holds while a search orders its actions."""


class Budget:
    """The activations that one rank holds, counted in stages, at most `capacity`.

    A micro-batch needs memory for all of a rank's stages before its backward frees any of it. So memory is reserved for
    the oldest micro-batch first, then for the next; each may count on the memory that the older ones will free:

        capacity 4, two stages per rank         held + still needed by m, and held by the younger ones
          m = 0 holds 1, needs 1                1 + 1 + 2 = 4    fits
          m = 1 holds 2                         2 + 0     = 2    fits;  so m = 2 must wait: m = 0 would get none

    So the oldest micro-batch can always go on, on every rank, and no rank waits for memory forever.
    """

    __slots__ = ("_capacity", "_oldest_growing", "_held", "_held_by_older", "_needed", "total")

    def __init__(self, capacity: int, num_stages: int, num_microbatches: int) -> None:
        self._capacity = capacity
        self._held = [0] * num_microbatches
        self._needed = [num_stages] * num_microbatches
        self.total = 0
        self._oldest_growing = 0
        self._held_by_older = 0  # by micro-batches before `_oldest_growing`, which have run all their forwards

    def allows(self, microbatch: int) -> bool:
        """Whether the rank may run one more forward of `microbatch`."""
        room = self._capacity - self.total - 1
        if room < 0:
            return False
        room += self._held_by_older
        for older in range(self._oldest_growing, microbatch):
            if self._needed[older] > room:
                return False
            room += self._held[older]
        return True

    def take(self, microbatch: int) -> None:
        """Count a forward of `microbatch`."""
        self.total += 1
        self._held[microbatch] += 1
        self._needed[microbatch] -= 1
        while self._oldest_growing < len(self._needed) and not self._needed[self._oldest_growing]:
            self._held_by_older += self._held[self._oldest_growing]
            self._oldest_growing += 1

    def free(self, microbatch: int) -> None:
        """Count a `B` or `W` of `microbatch`, which frees an activation."""
        self.total -= 1
        self._held[microbatch] -= 1
        if microbatch < self._oldest_growing:
            self._held_by_older -= 1
