"""Runs a function on all ranks, and lets all of them raise the error that one has."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.runtime.comm.object_collectives import all_gather_objects

_T = TypeVar("_T")


def on_all_ranks(function: Callable[[], _T]) -> list[_T]:
    """What the function returns on each rank, in rank order. Called by all ranks of the world, if there are several.

    Raises:
        HanayoError: on all ranks with the same message, if the function has raised one on any.
    """
    own: list[_T] = []
    failure: HanayoError | None = None
    try:
        own = [function()]
    except HanayoError as error:
        failure = error
    world = dist.group.WORLD
    if world is None:
        if failure is not None:
            raise failure
        return own
    outcomes = all_gather_objects(world, (own, failure and (type(failure), str(failure))))
    failures = [found for _, found in outcomes if found]
    if failures:
        kind, message = failures[0]
        if len(failures) < len(outcomes):
            first = next(rank for rank, (_, found) in enumerate(outcomes) if found)
            message = f"rank {first}: {message}"
        raise kind(message) from failure
    return [one for found, _ in outcomes for one in found]


def with_common_errors(function: Callable[[], _T]) -> _T:
    """What the function returns here; nothing else is sent. Called and raises as `on_all_ranks`."""
    own: list[_T] = []
    on_all_ranks(lambda: own.append(function()))
    return own[0]
