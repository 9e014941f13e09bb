"""Runs a check in the pool's workers, also with a part of the package broken in them on purpose."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning import LightningModule

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.checking import Verdict
from lightning_hanayo.checking.case import Case, RankFailure, Results, TrainerOptions, cast
from lightning_hanayo.checking.examine import examine
from tests.harness.models import build
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout

Break = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which something is broken, such as `partial(patch, "lightning_hanayo.module.name", other)`. It
is called in each worker, so it must be picklable: a function of a module, or a `partial` of one."""


def verdict_of(
    pool: Pool,
    module_factory: Callable[[], LightningModule],
    batches: list[Any],
    layout: Layout,
    break_: Break | None = None,
    *,
    steps: int = 2,
    accumulate: int = 1,
    clip: float | None = None,
    **strategy: Any,
) -> Verdict:
    """The verdict of a check on a layout.

    Args:
        pool: whose workers are the ranks.
        module_factory: makes the module; its weights are those of seed 0.
        batches: batch i of data rank r is `batches[i * D + r]`.
        layout: the ranks.
        break_: breaks something in the workers, for the time of each run; None: all is whole.
        steps, accumulate, clip: of the Trainer.
        strategy: further options of HanayoStrategy.
    """
    options = HanayoStrategy(
        num_waves=layout.waves,
        num_microbatches=layout.num_microbatches,
        schedule=layout.schedule,
        cube=layout.cube,
        cube_outside=layout.outside,
        **strategy,
    ).options
    needed = tuple(cast(batch, torch.float64) for batch in batches[: steps * layout.data * accumulate])
    trainer = TrainerOptions(accumulate, clip)
    module = build(module_factory)
    case = Case(module, needed, options, layout.topology, trainer, steps)
    return examine(case, partial(_in_pool, pool, break_))


def _in_pool(
    pool: Pool, break_: Break | None, world_size: int, function: Callable[..., Any], *arguments: Any
) -> Results:
    try:
        return pool.run(world_size, _broken, break_, function, *arguments)
    except RunFailed as failed:  # a rank has died, for instance because another one failed
        return [RankFailure(one.rank, one.kind, one.message, one.trace) for one in failed.failures]


def _broken(break_: Break | None, function: Callable[..., Any], *arguments: Any) -> Any:
    if break_ is None:
        return function(*arguments)
    with break_():
        return function(*arguments)
