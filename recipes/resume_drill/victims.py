"""Chooses which process is killed at which step, from a seed."""

from dataclasses import dataclass
from random import Random
from typing import Literal

Launcher = Literal["lightning", "torchrun"]


@dataclass(frozen=True)
class Kill:
    """A planned kill.

    Args:
        step: it comes after this step, at the earliest.
        delay: seconds after that step was seen.
        victim: a rank, or "launcher" for torchrun's agent. With Lightning's launcher, rank 0 is the launcher.
    """

    step: int
    delay: float
    victim: int | Literal["launcher"]

    def __str__(self) -> str:
        return self.victim if isinstance(self.victim, str) else f"rank {self.victim}"


def plan(seed: int, num_kills: int, num_steps: int, num_ranks: int, launcher: Launcher) -> list[Kill]:
    """Draw kills at different steps, in order; the delay is about as long as a step and its save.

    Example:
        >>> plan(0, 3, 200, 4, "lightning") == plan(0, 3, 200, 4, "lightning")
        True
    """
    random = Random(seed)
    victims: list[int | Literal["launcher"]] = [*range(num_ranks)]
    if launcher == "torchrun":
        victims.append("launcher")
    steps = sorted(random.sample(range(1, num_steps), num_kills))
    return [Kill(step, random.uniform(0.0, 0.2), random.choice(victims)) for step in steps]
