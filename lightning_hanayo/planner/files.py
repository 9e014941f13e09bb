"""Profile: the measured times of a run's stages and messages, in a JSON file with which later runs choose a layout.

{"unit": "s", "schedule": "hanayo-zb", "num_ranks": 2, "num_waves": 2, "num_microbatches": 4, "blocks": [1, 1, ...],
 "forward": [0.0021, ...], "backward_input": [...], "backward_weight": [...], "message": 0.0003}

Reads the small files that people give: an error names a wrong one, and says what was expected.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from lightning_hanayo.errors import HanayoError, nearest, writing
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
        own = {name: value for name, value in vars(self).items() if name != "costs"}
        measured = {name: getattr(self.costs, name) for name in _MEASURED}
        lines = (f'"{name}": {json.dumps(value)}' for name, value in ({"unit": "s"} | own | measured).items())
        with writing(path):
            Path(path).write_text("{" + ",\n ".join(lines) + "}\n", encoding="utf-8")

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


def read_text(path: str | PathLike[str], max_bytes: int) -> str:
    """The file's text; raises `HanayoError` if it is longer, and what reading raises."""
    if Path(path).stat().st_size > max_bytes:
        raise HanayoError(f"it has more than {max_bytes >> 20} MiB")
    return Path(path).read_text(encoding="utf-8")


@contextmanager
def refusing(path: str | PathLike[str], kind: str, expected: str) -> Iterator[None]:
    """Inside it the file is read and understood; what fails becomes one error.

    Args:
        path: the file, or what the user called it.
        kind: what it is no such thing of, as "profile".
        expected: what was.

    Raises:
        HanayoError: the file can't be read, or is something else.
    """
    try:
        yield
    except OSError as error:
        raise HanayoError(f"{fspath(path)} can't be read: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        reason = "it is no text" if isinstance(error, UnicodeDecodeError) else repr(error)
        reason = str(error) if isinstance(error, HanayoError) else reason
        raise HanayoError(f"{fspath(path)} is no {kind}: {reason}; expected {expected}") from None
