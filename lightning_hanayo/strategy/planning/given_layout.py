"""The option `layout` of `HanayoStrategy`: the file of a plan takes the place of the options that say the same."""

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.plan_file import load_plan

AT_START = "plan"
"""makes a plan when training starts"""
SIZES: Mapping[str, Any] = {
    "pipeline_parallel_size": "auto",
    "num_waves": "auto",
    "cube": 1,
    "data_parallel_size": 1,
    "num_microbatches": "auto",
}
"""what a plan at the start decides, with the defaults"""
_IN_FILES = {
    **SIZES,
    "schedule": "auto",
    "recompute": "none",
    "shard_optimizer": False,
    "cube_weights": "microbatch",
    "pairs": False,
}


def with_layout(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the constructor, with those of the plan that `layout` names.

    Raises:
        HanayoError: the file is no plan, or another argument says what a plan says.
    """
    layout = arguments["layout"]
    if layout is None:
        return dict(arguments)
    if not isinstance(layout, (str, PathLike)) or not fspath(layout):
        raise HanayoError(f"layout={layout!r}: expected the path of a plan.yaml, {AT_START!r}, or None")
    decided = SIZES if layout == AT_START else _IN_FILES
    given = [name for name, default in decided.items() if arguments[name] != default]
    if given:
        raise HanayoError(
            f"layout={fspath(layout)!r} says what {given[0]} is, and {given[0]}={arguments[given[0]]!r} was given, "
            f"too; leave one of them out"
        )
    planned = {} if layout == AT_START else load_plan(layout)
    unknown = set(planned) - set(_IN_FILES)
    if unknown:
        raise HanayoError(f"layout={fspath(layout)!r} is no plan: it sets {', '.join(sorted(unknown))}, too")
    cube = planned.get("cube", 1)
    tuples = {"cube": tuple(cube)} if isinstance(cube, list) else {}
    return dict(arguments) | planned | tuples | {"layout": fspath(layout)}
