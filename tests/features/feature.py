"""A feature: something that users ask of a Trainer, and what must come of it on each layout.

    outcome     Equal        all that the trial records equals what it records in one process, within a bound
                AsDDP        it equals what Lightning's DDP leaves on as many data ranks, which differs from one process
                Differs      the named records differ, for a reason that the table gives; all others are equal
                Refused      an error that names the cause and the way out; or by Lightning itself

A feature is a row of the table in docs/supported/features.md, which `python -m tests.features.table` writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from lightning import LightningModule

from tests.features.net import Data, Net
from tests.features.trial import Trial, fit
from tests.habits.habit import Refused
from tests.harness.training import Layout

ROUNDING = 2e-6
"""in fp32: the sums over micro-batches and data ranks are in another order"""

LAYOUTS = {
    "P = 2": Layout(2, 1, 1),
    "P = 2, D = 2": Layout(2, 1, 2),
    "cube (2, 1, 1)": Layout(cube=(2, 1, 1)),
}


@dataclass(frozen=True)
class Equal:
    """Numbers agree within `bound`, relative to the largest of each tensor; all else is equal."""

    bound: float = ROUNDING

    def __str__(self) -> str:
        return "equal" if self.bound <= ROUNDING else f"equal to {self.bound:g}"


@dataclass(frozen=True)
class AsDDP:
    """DDP on two processes leaves other values than one process; ours leaves those of DDP."""

    bound: float = ROUNDING

    def __str__(self) -> str:
        return "as DDP"


@dataclass(frozen=True)
class Differs:
    """These records differ from those of one process; the feature's note says why."""

    records: tuple[str, ...]
    bound: float = ROUNDING

    def __str__(self) -> str:
        return "differs"


@dataclass(frozen=True)
class RefusedByLightning:
    """Lightning raises an error whose message matches, with DDP too."""

    message: str

    def __str__(self) -> str:
        return "refused, as with DDP"


FeatureOutcome = Equal | AsDDP | Differs | Refused | RefusedByLightning


def on(
    pipeline: FeatureOutcome, with_data: FeatureOutcome | None = None, in_cube: FeatureOutcome | None = None
) -> dict[str, FeatureOutcome]:
    """One outcome at P = 2, and another one with data ranks, or one for both; and one in a cube that is tried, too."""
    outcomes = {"P = 2": pipeline, "P = 2, D = 2": pipeline if with_data is None else with_data}
    return outcomes if in_cube is None else outcomes | {"cube (2, 1, 1)": in_cube}


EQUAL = on(Equal())


@dataclass(frozen=True)
class Feature:
    """One feature. A worker finds it by its name.

    Args:
        name: what users write, in plain English with code in backticks; the row's first cell.
        trainer: makes options of the Trainer; it gets a folder that all ranks share.
        module: makes the module; weights are those of seed 0.
        data: the loaders.
        script: what the user's script does with the trial's Trainer, module and data.
        outcomes: by the name of the layout.
        note: a line of the table: what is compared beyond the usual records, or why it differs.
        strategy: options of HanayoStrategy.
    """

    name: str
    trainer: Callable[[Path], dict[str, Any]] = lambda _: {}
    module: Callable[[], LightningModule] = Net
    _: KW_ONLY
    data: type[Data] = Data
    script: Callable[[Trial], None] = fit
    outcomes: Mapping[str, FeatureOutcome] = field(default_factory=lambda: EQUAL)
    note: str = ""
    strategy: Mapping[str, Any] = field(default_factory=dict)
