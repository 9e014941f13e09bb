"""The file of a plan: a configuration that `hanayo fit` applies on top of the recipe, and that a strategy reads.

# hanayo plan: 2.64 s per step of 512 samples, 43.9 GB per device
trainer:
  devices: 8
  num_nodes: 8
  accumulate_grad_batches: 1
  strategy:
    class_path: lightning_hanayo.HanayoStrategy
    init_args: {pipeline_parallel_size: 2, num_waves: 2, ...}
data:
  init_args:
    batch_size: 128
"""

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_hanayo.errors import HanayoError, counted, writing
from lightning_hanayo.planner.candidates import ONE_RANK, Candidate
from lightning_hanayo.planner.files import read_text, refusing
from lightning_hanayo.planner.ranking import Plan, bytes_of

STRATEGY = "lightning_hanayo.HanayoStrategy"
MAX_BYTES = 1 << 20
"""of a file"""
_SIZES = ("pipeline_parallel_size", "data_parallel_size", "num_microbatches")
"""that each plan has"""
OF_BOTH = ("shard_optimizer", "cube_weights", "pairs", "experts", "cube_outside")
"""options of `HanayoStrategy` that are attributes of a `Candidate`, with the same values"""


def strategy_options(candidate: Candidate) -> dict[str, Any]:
    """The arguments of `HanayoStrategy` for a layout."""
    return {
        "pipeline_parallel_size": candidate.pipe,
        "num_waves": candidate.num_waves if candidate.pipe > 1 else "auto",
        "data_parallel_size": candidate.data,
        "cube": list(candidate.mesh) if candidate.cube_size > 1 else 1,
        "num_microbatches": candidate.num_microbatches,
        "schedule": "auto" if candidate.schedule == ONE_RANK else candidate.schedule,
        "recompute": "blocks" if candidate.recompute else "none",
        **{name: getattr(candidate, name) for name in OF_BOTH},
        "step": "batch" if candidate.runs_step_once else "auto",
    }


def overlay(plan: Plan, *, num_nodes: int, accelerator: str | None, sets_batch_size: bool) -> dict[str, Any]:
    """What the file holds.

    Args:
        plan: its fastest layout is taken.
        num_nodes: of the run.
        accelerator: the Trainer's; None: the recipe's.
        sets_batch_size: whether the recipe's data has an argument `batch_size`.
    """
    candidate = plan.first.candidate
    trainer: dict[str, Any] = {
        "devices": plan.num_devices // num_nodes,
        "num_nodes": num_nodes,
        "accumulate_grad_batches": candidate.accumulate,
        "strategy": {"class_path": STRATEGY, "init_args": strategy_options(candidate)},
    }
    if accelerator is not None:
        trainer["accelerator"] = accelerator
    made: dict[str, Any] = {"trainer": trainer}
    if sets_batch_size:
        made["data"] = {"init_args": {"batch_size": candidate.batch_size}}
    return made


def save_plan(path: str | Path, plan: Plan, content: Mapping[str, Any]) -> None:
    """Write the file.

    Raises:
        HanayoError: it can't be written.
    """
    first, own = plan.first, plan.first.candidate
    devices = f"{counted(plan.num_devices, 'device')} ({plan.machine.name}), {bytes_of(first.memory.total)} per device"
    about = f"# hanayo plan: {first.seconds:.3g} s per step of {counted(plan.global_batch, 'sample')} on {devices}\n"
    about += f"# {own}\n# DataLoader's batch_size: {own.batch_size}, for each of {counted(own.data, 'data rank')}\n"
    with writing(path):
        Path(path).write_text(about + yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


def load_plan(path: str | PathLike[str]) -> dict[str, Any]:
    """The arguments of `HanayoStrategy` in a file that `hanayo plan` wrote.

    Raises:
        HanayoError: there is no such file, or it holds something else.
    """
    with refusing(f"layout={fspath(path)!r}", "plan", "the plan.yaml that hanayo plan writes"):
        try:
            data = yaml.safe_load(read_text(path, MAX_BYTES))
        except yaml.YAMLError as error:
            raise HanayoError(f"it is no YAML: {str(error).splitlines()[0]}") from None
        options = data["trainer"]["strategy"]["init_args"]
        if not isinstance(options, dict) or not set(_SIZES) <= set(options):
            raise HanayoError(f"trainer.strategy.init_args has no {', '.join(_SIZES)}")
        return dict(options)
