"""`HanayoStrategy(layout="plan")`: the fastest sizes for a module and its loader, found before any process starts.

The option `layout` of `HanayoStrategy`: the file of a plan takes the place of the options that say the same.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from itertools import islice
from os import PathLike, fspath
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.candidates import ONE_RANK, SPLIT, WHOLE, BatchesOfStep, Candidate, Choices
from lightning_hanayo.planner.machine import KNOWN
from lightning_hanayo.planner.model_facts import ModelFacts
from lightning_hanayo.planner.ranking import OF_BOTH, bytes_of, load_plan, make_plan, strategy_options
from lightning_hanayo.strategy.lightning.parallel_strategy import MeshParallelStrategy
from lightning_hanayo.strategy.model_facts import read_batch
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.setup.plan import choose_layout
from lightning_hanayo.topology import Topology


def plan_at_start(strategy: MeshParallelStrategy, trainer: "pl.Trainer", data: Any) -> Options:
    """Choose D, P, W, B and the cube. All ranks that call this get the same, as it depends on shapes and names alone.

    The loader's batches stay as they are, so layouts with more data ranks take more samples per step: they are compared
    by the time per sample.

    Args:
        strategy: its options, devices and number of ranks count.
        trainer: its module, precision and batches per step count.
        data: a LightningDataModule or loaders; None: the module's own.

    Returns:
        The strategy's options, with the sizes.

    Raises:
        HanayoError: the samples of a batch can't be counted, or no layout fits; the message says what is missing.
    """
    options, module, device = strategy.options, strategy.module, strategy.root_device
    batch = _first_batch(trainer, module if data is None else data)
    facts, num_samples = read_batch(module, batch, options, trainer.precision)
    name = torch.cuda.get_device_name(device).lower().replace(" ", "") if device.type == "cuda" else device.type
    # the data sheet of this device; a nominal CPU or an H100 for others
    machine = next((one for known, one in KNOWN.items() if known in name), KNOWN["h100"])
    machine = replace(machine, ranks_per_node=max(1, strategy.num_processes))

    def accept(one: Candidate) -> bool:
        is_asked = one.recompute == (options.recompute == "blocks")
        is_asked &= one.shard_optimizer == (options.shard_optimizer and one.data > 1)
        return is_asked and (options.schedule == "auto" or one.schedule != WHOLE)

    once, batches = options.step == "batch", BatchesOfStep(num_samples, trainer.accumulate_grad_batches)
    choices = Choices((options.cube_weights,), (options.pairs,), once, (options.experts,), (options.cube_outside,))
    plan = make_plan(
        facts, machine, num_devices=strategy.topology.world_size, step=batches, accept=accept, choices=choices
    )
    first = plan.first
    rank_zero_info(
        f"layout='plan' takes {first.candidate}: {first.seconds:.3g} s per step of {plan.global_batch} samples and "
        f"{bytes_of(first.memory.total)} per device, as predicted for {machine.name}; the fastest of "
        f"{plan.num_considered} layouts"
    )
    decided = strategy_options(first.candidate)
    return replace(options, layout=None, **{name: decided[name] for name in SIZES})


_COUNTED: Mapping[str, Collection[Any]] = {
    "recompute": ("none", "blocks"),
    "cube_memory": ("gathered",),
    "cube_exclude": (("experts",),),
    "offload_optimizer": (False,),
    "activation_budget": (None,),
    "balance": ("parameters",),
}
"""options that change memory -> the values that plans count"""


def given_layout(
    options: Options, topology: Topology, facts: ModelFacts, *, batch_size: int, accumulate: int
) -> Candidate:
    """The layout that a run with these options has, whose data ranks get batches of so many samples.

    Raises:
        HanayoError: the model can't be cut so, or plans don't count one of the options.
    """
    if options.layout == AT_START:
        raise HanayoError(f"layout={AT_START!r} chooses when training starts; there is no layout before")
    layout = choose_layout(options, topology, len(facts.blocks), steady=True)
    given = {name: getattr(options, name) for name in _COUNTED} | {"schedule": layout.schedule}
    given["cube_exclude"] = tuple(options.cube_exclude)
    accepted = {**_COUNTED, "schedule": (WHOLE, SPLIT) if topology.pipe > 1 else (layout.schedule,)}
    for name, value in given.items():
        if value not in accepted[name]:
            others = " or ".join(map(repr, accepted[name]))
            raise HanayoError(f"plans don't count {name}={value!r}, but {others}; WaveReport measures a short run")
    for rule in facts.required:
        if not rule.holds(topology.cube):
            raise HanayoError(f"cube={topology.cube}: {rule.what} don't divide over the cube")
    count, is_cut = layout.num_microbatches, topology.pipe > 1
    return Candidate(
        topology.data,
        topology.pipe,
        topology.cube,
        layout.num_waves if is_cut else 1,
        -(-batch_size // count),  # of the largest micro-batch
        count,
        accumulate,
        layout.schedule if is_cut else ONE_RANK,
        options.recompute == "blocks",
        runs_step_once=layout.runs_step_once,
        **{name: getattr(options, name) for name in OF_BOTH},
    )


def _first_batch(trainer: "pl.Trainer", data: Any) -> Any:
    """A batch of the training loader, without an effect on what training will see."""
    if isinstance(data, pl.LightningDataModule):
        if trainer.world_size > 1 and trainer.strategy.cluster_environment.creates_processes_externally:  # type: ignore[attr-defined]
            raise HanayoError(f"layout='plan' needs a batch before ranks agree on who prepares the data. {_BY_FILE}")
        data = _copied(data)
        data.prepare_data()
        data.setup("fit")
    loaders = data.train_dataloader() if isinstance(data, (pl.LightningDataModule, pl.LightningModule)) else data
    is_combined = isinstance(loaders, CombinedLoader)
    combined = copy.copy(loaders) if is_combined else CombinedLoader(loaders, "max_size_cycle")
    if any(isinstance(one, Iterator) for one in combined.flattened):
        raise HanayoError("layout='plan' needs a loader that can be read twice; for this one, give the sizes instead")
    combined.flattened = [_copied(one) if isinstance(one, DataLoader) else one for one in combined.flattened]
    with isolate_rng(include_cuda=False):
        batches = list(islice(combined, 1))
    if not batches:
        raise HanayoError("layout='plan': the training loader has no batch")
    return batches[0][0]


def _copied(data: Any) -> Any:
    """A copy of a data module or a loader, with random generators of its own, and the same dataset if it is a loader's.

    Raises:
        HanayoError: it can't be copied.
    """
    dataset = data.dataset if isinstance(data, DataLoader) else None
    try:
        return copy.deepcopy(data, {id(dataset): dataset})
    except Exception as error:  # of whatever it holds
        name = type(data).__name__
        raise HanayoError(f"layout='plan' copies {name}, which can't be copied: {error}. {_BY_FILE}") from error


_BY_FILE = "Run `hanayo plan` once, and give its file: layout='plan.yaml'"
AT_START = "plan"
"""makes a plan when training starts"""
SIZES = ("pipeline_parallel_size", "num_waves", "cube", "data_parallel_size", "num_microbatches")
"""the options that a plan at the start decides"""


def with_layout(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the strategy's constructor, with those of the plan that `layout` names.

    Raises:
        HanayoError: the file is no plan, or another argument says what a plan says.
    """
    layout = arguments["layout"]
    if layout is None:
        return arguments
    if not isinstance(layout, (str, PathLike)) or not fspath(layout):
        raise HanayoError(f"layout={layout!r}: expected the path of a plan.yaml, {AT_START!r}, or None")
    in_files = strategy_options(Candidate())
    defaults = signature(Options).parameters
    given = [name for name in (SIZES if layout == AT_START else in_files) if arguments[name] != defaults[name].default]
    if given:
        other = f"{given[0]}={arguments[given[0]]!r}"
        raise HanayoError(f"layout={fspath(layout)!r} says what {given[0]} is, and so does {other}; leave one out")
    planned = {} if layout == AT_START else load_plan(layout)
    unknown = set(planned) - set(in_files)
    if unknown:
        raise HanayoError(f"layout={fspath(layout)!r} is no plan: it sets {', '.join(sorted(unknown))}, too")
    return arguments | planned | {"layout": fspath(layout)}
