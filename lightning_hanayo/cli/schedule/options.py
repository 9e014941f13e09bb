"""Options: what the subcommands share, and how a schedule, its costs and its timeline come out of it."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from lightning_hanayo.cli.readable import Readable
from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.planner.profile import Profile
from lightning_hanayo.schedule import CostModel, Schedule, Timeline, build, schedule_names, simulate, with_loss_stage
from lightning_hanayo.schedule.build import WAVES

DEFAULT_RANKS = 4
MOST_ACTIONS = 5_000_000
"""in a schedule that is built for a picture or a table; more would keep a terminal waiting for minutes"""

_COSTS = {
    "forward": "one micro-batch forward through one rank's share of the model (T_F; default 1)",
    "backward_input": "the same for the gradients of the inputs (default 1)",
    "backward_weight": "the same for the gradients of the weights (default 1)",
    "message": "one hop between two ranks (T_C; default 0)",
    "message_between_nodes": "one hop between two nodes; --message is then a hop within a node",
    "gradient_reduce": "summing a rank's gradients over the data ranks, once per step (default 0)",
    "replica_reduce": "summing them over both copies of the model in chimera, once per step (default 0)",
}


class Parser(Readable, ArgumentParser):
    """Reads a subcommand's options, each written in full or by its letter. argparse alone: help must come at once."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter
        )


def number(text: str) -> float:
    """A finite number of at least 0.

    Raises:
        ArgumentTypeError: it isn't.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0:
        raise ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0.

    Raises:
        ArgumentTypeError: it isn't.
    """
    if number(text) == 0:
        raise ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return float(text)


def whole(text: str) -> int:
    """A whole number; whether it is large enough is said by what it is for.

    Raises:
        ArgumentTypeError: it isn't.
    """
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def whole_or_auto(text: str) -> int | str:
    """A whole number, or the word.

    Raises:
        ArgumentTypeError: it is neither.
    """
    return text if text == "auto" else whole(text)


def cost(text: str) -> float | tuple[float, ...]:
    """A number, or one per stage between commas.

    Example:
        >>> cost("0.5"), cost("1,1,2,1")
        (0.5, (1.0, 1.0, 2.0, 1.0))

    Raises:
        ArgumentTypeError: it is neither.
    """
    values = tuple(map(number, text.split(",")))
    return values if len(values) > 1 else values[0]


def add_schedule(parser: Parser) -> None:
    """A schedule, by name and sizes, or from a file."""
    names = ", ".join(schedule_names())
    parser.add_argument("schedule", metavar="NAME|FILE.csv", help=f"{names}, auto (the best); or a table of actions")
    add_sizes(parser, whole_or_auto, " or auto")
    parser.add_argument(
        "-V", "--stages-per-rank", type=whole, metavar="V", help="stages on each rank, for the interleaved schedules"
    )


def add_sizes(parser: Parser, waves: Callable[[str], int | str] = whole, choice: str = "") -> None:
    """Ranks, micro-batches, waves."""
    parser.add_argument("-P", "--ranks", type=whole, metavar="P", help=f"pipeline ranks (default {DEFAULT_RANKS})")
    parser.add_argument("-B", "--microbatches", type=whole, metavar="B", help="micro-batches per step (default P)")
    meaning = f"waves{choice}, of two stages per rank each (default 1)"
    parser.add_argument("-W", "--waves", type=waves, metavar="W", help=meaning)


def add_costs(parser: Parser) -> None:
    """How long things take, how much memory there is, and what is simulated with them."""
    parser.add_argument(
        "--costs",
        dest="profile",
        metavar="PROFILE.json",
        help="costs (in ms) and sizes as a training run measured them; what is given beside comes in their place",
    )
    for name, meaning in _COSTS.items():
        own = name not in ("message_between_nodes",)
        help_text = f"{meaning}; a list gives each stage's own time" if name == "forward" else meaning
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=cost if own else number,
            metavar="T[,T...]" if own else "T",
            help=help_text,
        )
    parser.add_argument("--ranks-per-node", type=whole, metavar="N", help="needed by --message-between-nodes")
    parser.add_argument(
        "--activation-budget",
        type=above_zero,
        metavar="M",
        help="the most activations on a rank, in micro-batches (M_a)",
    )
    parser.add_argument(
        "--steps", type=whole, default=1, metavar="N", help="steps in a row, without a barrier (default 1)"
    )
    parser.add_argument("--unit", default="", metavar="U", help="the unit of time that pictures show, such as ms")


def add_json(parser: Parser) -> None:
    """Whether a program reads the result."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


class Options:
    """What the user asked for, as things of ours."""

    def __init__(self, given: Namespace) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        """An option as it was parsed."""
        return getattr(self._given, name)

    @property
    def costs(self) -> CostModel:
        """The costs given; those of the profile, or defaults, for the others."""
        known = {field.name for field in fields(CostModel)}
        given = {name: getattr(self._given, name) for name in known if getattr(self._given, name, None) is not None}
        return replace(self._profile.costs.scaled(1e3) if self._profile is not None else CostModel(), **given)

    @cached_property
    def _profile(self) -> Profile | None:
        return None if self.profile is None else Profile.load(self.profile)

    @property
    def unit(self) -> str:
        """The unit of time that is shown."""
        unit: str = self._given.unit
        return unit or ("ms" if self.profile is not None else "")

    @property
    def sizes(self) -> dict[str, Any]:
        """Ranks, micro-batches and waves as `build` and `compare` take them; a profile's where none are given."""
        known = self._profile
        ranks = (known.num_ranks if known else DEFAULT_RANKS) if self.ranks is None else self.ranks
        microbatches = (known.num_microbatches if known else ranks) if self.microbatches is None else self.microbatches
        waves = (known.num_waves if known else 1) if self.waves is None else self.waves
        check_sizes(ranks, microbatches, 2 * (max(WAVES) if waves == "auto" else waves))
        return {"num_ranks": ranks, "num_microbatches": microbatches, "num_waves": waves}

    def make_schedule(self) -> Schedule:
        """The schedule asked for: built, or read from its file.

        Raises:
            HanayoError: there is no such schedule, or sizes that it can't have.
        """
        schedule = self._read() if _is_file(self.schedule) else self._build()
        return with_loss_stage(schedule) if getattr(self._given, "loss_stage", False) else schedule

    def _read(self) -> Schedule:
        names = {"ranks": self.ranks, "microbatches": self.microbatches, "waves": self.waves}
        names["stages-per-rank"] = self.stages_per_rank
        given = [f"--{name}" for name, value in names.items() if value is not None]
        if given:
            raise HanayoError(f"{self.schedule} is a table, which has its own sizes; leave out {', '.join(given)}")
        return Schedule.from_csv(self.schedule)

    def _build(self) -> Schedule:
        sizes = self.sizes
        if self.stages_per_rank is not None:
            check_sizes(sizes["num_ranks"], sizes["num_microbatches"], self.stages_per_rank)
            sizes["num_stages_per_rank"] = self.stages_per_rank
        known = (*schedule_names(), "auto")
        if self.schedule not in known:
            hint = nearest(self.schedule, known)
            raise HanayoError(f"there is no schedule {self.schedule!r}: {hint}; or a file ending in .csv")
        return build(self.schedule, **sizes, costs=self.costs, activation_budget=self.activation_budget)

    def simulate(self, schedule: Schedule) -> Timeline:
        """The schedule under the costs given."""
        return simulate(schedule, self.costs, self.steps)


def check_sizes(ranks: int, microbatches: int, stages_per_rank: int) -> None:
    """Refuse what would be far too large before it is begun.

    Raises:
        HanayoError: there would be more than `MOST_ACTIONS`.
    """
    count = 3 * ranks * microbatches * stages_per_rank
    if count > MOST_ACTIONS and min(ranks, microbatches, stages_per_rank) > 0:
        raise HanayoError(
            f"{ranks} ranks, {microbatches} micro-batches and {stages_per_rank} stages per rank make up to {count:,} "
            f"actions, more than {MOST_ACTIONS:,}; ask for fewer"
        )


def title(schedule: Schedule) -> str:
    """What a picture says it shows.

    Example:
        >>> title(build("hanayo", num_ranks=4, num_microbatches=8))
        'hanayo: 4 ranks, 2 stages per rank, 8 micro-batches'
    """
    return f"{schedule.name}: {describe(schedule)}"


def describe(schedule: Schedule) -> str:
    """The sizes of a schedule in words."""
    held = sorted({len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)})
    stages = f"{held[0]} stage{'s' * (held[0] != 1)} per rank" if len(held) == 1 else f"{schedule.num_stages} stages"
    copies = ", two copies of the model" if schedule.replica_of else ""
    return f"{schedule.num_ranks} ranks, {stages}, {schedule.num_microbatches} micro-batches{copies}"


def _is_file(name: str) -> bool:
    return name.endswith(".csv") or Path(name).is_file() or "/" in name
