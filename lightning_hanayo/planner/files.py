"""Profile: the measured times of a run's stages and messages, in a JSON file with which later runs choose a layout.

{"unit": "s", "schedule": "hanayo-zb", "num_ranks": 2, "num_waves": 2, "num_microbatches": 4, "blocks": [1, 1, ...],
 "forward": [0.0021, ...], "backward_input": [...], "backward_weight": [...], "message": 0.0003}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_hanayo.errors import HanayoError, nearest, writing
from lightning_hanayo.planner.small_file import read_text, refusing
from lightning_hanayo.schedule import CostModel

MAX_BYTES = 16 << 20
"""of a file: a stage takes about 60 bytes"""
_MEASURED = ("forward", "backward_input", "backward_weight", "message")


@dataclass(frozen=True)
class Profile:
    """Measured times, and the layout in which they were measured.

    Args:
        schedule: the name of the schedule that ran.
        num_ranks: P.
        num_waves: W.
        num_microbatches: B. The costs are for micro-batches of this size.
        blocks: how many blocks each stage held.
        costs: in seconds, one per stage that holds blocks; one message.
    """

    schedule: str
    num_ranks: int
    num_waves: int
    num_microbatches: int
    blocks: tuple[int, ...]
    costs: CostModel

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON.

        Raises:
            HanayoError: the file can't be written.
        """
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "costs"}
        measured = {name: _to_the_nanosecond(getattr(self.costs, name)) for name in _MEASURED}
        text = ",\n ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in (own | measured).items())
        with writing(path):
            Path(path).write_text(f'{{"unit": "s",\n {text}}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Profile":
        """Read a file that `save` wrote.

        Raises:
            HanayoError: there is no such file, or it holds something else.
        """
        expected = f"the profile.json that a run writes, with {', '.join(_MEASURED)} in seconds"
        with refusing(path, "profile", expected):
            data = json.loads(read_text(path, MAX_BYTES))
            costs = CostModel(**{name: data[name] for name in _MEASURED})
            ranks, waves, microbatches = (int(data[name]) for name in ("num_ranks", "num_waves", "num_microbatches"))
            return cls(str(data["schedule"]), ranks, waves, microbatches, tuple(map(int, data["blocks"])), costs)


def _to_the_nanosecond(seconds: Any) -> Any:
    return tuple(round(one, 9) for one in seconds) if isinstance(seconds, tuple) else round(seconds, 9)


def costs_from(given: Any) -> CostModel | None:
    """The cost model that a user gives as the path of a profile, as a cost model or its fields, or None.

    Raises:
        HanayoError: `given` is something else, or the file is no profile.
    """
    if isinstance(given, (str, PathLike)):
        return Profile.load(given).costs
    if isinstance(given, Mapping):
        known = [field.name for field in fields(CostModel)]
        for name in given:
            if name not in known:
                raise HanayoError(f"costs: {name!r} is unknown; {nearest(str(name), known)}")
        return CostModel(**given)
    if given is None or isinstance(given, CostModel):
        return given
    raise HanayoError(f"costs={given!r}: expected the path of a profile.json, a CostModel or its fields, or None")
