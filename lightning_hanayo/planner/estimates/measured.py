"""Times that a run has measured, which take the place of counted ones."""

from dataclasses import dataclass

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.estimates.block_time import PartTimes
from lightning_hanayo.planner.profile import Profile


@dataclass(frozen=True)
class Measured:
    """Times of a run without a cube, for one sample."""

    block: PartTimes
    outside: float
    """the forward of what isn't in the stack"""

    @classmethod
    def of(cls, profile: Profile, samples: float) -> "Measured":
        """Of a run's profile, whose micro-batches had so many samples. The last stage has head and loss, too.

        Raises:
            HanayoError: the profile hasn't the times of each stage, or they are 0.
        """
        costs, blocks = profile.costs, profile.blocks
        values = (costs.forward, costs.backward_input, costs.backward_weight)
        times = [one for one in values if isinstance(one, tuple) and len(one) == len(blocks)]
        if len(times) != len(values) or not all(blocks):
            raise HanayoError("the profile has no time of each stage, or a stage without blocks; measure once more")
        inner = max(1, len(blocks) - 1)
        each = [sum(one[:inner]) / (samples * sum(blocks[:inner])) for one in times]
        if not sum(each):
            raise HanayoError("the profile's stages take no time; measure once more")
        last = sum(one[-1] for one in times) / samples - blocks[-1] * sum(each)
        return cls(PartTimes(each[0], each[1] + each[2], each[1], each[2]), max(0.0, last) / 3)
