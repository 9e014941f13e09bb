"""Defines the options that the subcommands share, and builds the schedule, costs and timeline that they ask for."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_hanayo.cli.schedule.argument_types import cost, integer, integer_or_auto, non_negative, positive
from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.planner.profile import Profile
from lightning_hanayo.schedule import CostModel, Schedule, Timeline, build, schedule_names, simulate, with_loss_stage
from lightning_hanayo.schedule.cost import gather_compute_scatter

DEFAULT_RANKS = 4

_COSTS = {
    "forward": "time of one micro-batch's forward through one rank's share of the model (T_F; default 1); "
    "a list gives one time per stage",
    "backward_input": "the same for the gradients of the inputs (default 1)",
    "backward_weight": "the same for the gradients of the weights (default 1)",
    "message": "time of one message between two ranks (T_C; default 0)",
    "message_between_nodes": "time of one message between two nodes; --message is then within a node",
    "per_action": "time that each action takes besides, however small its stage: the host's (default 0)",
    "gradient_reduce": "time to all-reduce a rank's gradients over the data ranks, once per step (default 0)",
}
_NUMBERS = ("message_between_nodes", "per_action")


def no_such_schedule(name: str, known: Iterable[str]) -> HanayoError:
    """Returns the error for a name that is neither a known schedule nor a table."""
    return HanayoError(f"there is no schedule {name!r}: {nearest(name, known)}; or a file ending in .csv")


def add_schedule(parser: ArgumentParser) -> None:
    """Add a schedule: by name and sizes, or from a file."""
    names = ", ".join(schedule_names())
    parser.add_argument("schedule", metavar="NAME|FILE.csv", help=f"{names}, auto (the best); or a table of actions")
    add_sizes(parser, integer_or_auto, " or auto")
    meaning = "stages on each rank, for interleaved schedules"
    parser.add_argument("-V", "--stages-per-rank", type=integer, metavar="V", help=meaning)


def add_sizes(parser: ArgumentParser, waves: Callable[[str], int | str] = integer, choice: str = "") -> None:
    """Add the numbers of ranks, micro-batches and waves."""
    parser.add_argument("-P", "--ranks", type=integer, metavar="P", help=f"pipeline ranks (default {DEFAULT_RANKS})")
    parser.add_argument("-B", "--microbatches", type=integer, metavar="B", help="micro-batches per step (default P)")
    meaning = f"waves{choice}; each has two stages per rank (default 1)"
    parser.add_argument("-W", "--waves", type=waves, metavar="W", help=meaning)


def add_costs(parser: ArgumentParser) -> None:
    """Add the costs, the activation budget, and the simulation's length."""
    meaning = "costs (in ms) and sizes that a training run has measured; other options override them"
    parser.add_argument("--costs", dest="profile", metavar="PROFILE.json", help=meaning)
    for name, meaning in _COSTS.items():
        to_cost, metavar = (non_negative, "T") if name in _NUMBERS else (cost, "T[,T...]")
        parser.add_argument(f"--{name.replace('_', '-')}", type=to_cost, metavar=metavar, help=meaning)
    parser.add_argument("--ranks-per-node", type=integer, metavar="N", help="required by --message-between-nodes")
    meaning = (
        "let ranks run two micro-batches at once, so that the collectives of one hide behind the compute of the other; "
        "R: how long an action's collectives take, in the time of its compute (default 1)"
    )
    parser.add_argument("--pairs", type=positive, nargs="?", const=1.0, metavar="R", help=meaning)
    meaning = "the maximum of activations on a rank, in micro-batches (M_a)"
    parser.add_argument("--activation-budget", type=positive, metavar="M", help=meaning)
    meaning = "consecutive steps, without a barrier (default 1)"
    parser.add_argument("--steps", type=integer, default=1, metavar="N", help=meaning)
    meaning = "the unit of time shown in images, such as ms"
    parser.add_argument("--unit", dest="given_unit", default="", metavar="U", help=meaning)


class Options(Namespace):
    """The parsed options, and what they ask for: a schedule, its costs, its timeline."""

    @property
    def costs(self) -> CostModel:
        """The costs given as options; for the others, those of the profile, or defaults."""
        names = {field.name for field in fields(CostModel)}
        given = {name: value for name, value in vars(self).items() if name in names and value is not None}
        if self.pairs is not None:
            given["segments"] = gather_compute_scatter(self.pairs)
        return replace(self._profile.costs.scaled(1e3) if self._profile is not None else CostModel(), **given)

    @cached_property
    def _profile(self) -> Profile | None:
        return None if self.profile is None else Profile.load(self.profile)

    @property
    def unit(self) -> str:
        """The unit of time to show."""
        return str(self.given_unit) or ("ms" if self.profile is not None else "")

    @property
    def sizes(self) -> dict[str, Any]:
        """Ranks, micro-batches and waves, as arguments of `build` and `compare`: as given, or those of the profile."""
        profile, ranks, microbatches, waves = self._profile, self.ranks, self.microbatches, self.waves
        if ranks is None:
            ranks = profile.num_ranks if profile else DEFAULT_RANKS
        if microbatches is None:
            microbatches = profile.num_microbatches if profile else ranks
        if waves is None:
            waves = profile.num_waves if profile else 1
        return {"num_ranks": ranks, "num_microbatches": microbatches, "num_waves": waves}

    def make_schedule(self) -> Schedule:
        """The schedule: built, or read from its file.

        Raises:
            HanayoError: there is no such schedule, or it doesn't exist in these sizes.
        """
        name = self.schedule
        schedule = self._read() if name.endswith(".csv") or Path(name).is_file() or "/" in name else self._build()
        return with_loss_stage(schedule) if vars(self).get("loss_stage") else schedule

    def _read(self) -> Schedule:
        sizes = {"ranks": self.ranks, "microbatches": self.microbatches, "waves": self.waves}
        sizes["stages-per-rank"] = self.stages_per_rank
        given = [f"--{name}" for name, value in sizes.items() if value is not None]
        if given:
            raise HanayoError(f"{self.schedule} is a table, which has its own sizes; leave out {', '.join(given)}")
        return Schedule.from_csv(self.schedule)

    def _build(self) -> Schedule:
        sizes = self.sizes
        if self.stages_per_rank is not None:
            sizes["num_stages_per_rank"] = self.stages_per_rank
        known = (*schedule_names(), "auto")
        if self.schedule not in known:
            raise no_such_schedule(self.schedule, known)
        budget, pairs = self.activation_budget, self.pairs is not None
        return build(self.schedule, **sizes, costs=self.costs, activation_budget=budget, pairs=pairs)

    def simulate(self, schedule: Schedule) -> Timeline:
        """The schedule's timeline with these costs."""
        return simulate(schedule, self.costs, self.steps)
