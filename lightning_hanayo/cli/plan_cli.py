"""Builds what `hanayo fit` would train, without values where it can, and plans its layout instead of training it.

Shows a plan: a table, what it was made of, what was left out, and how to run it; or all of it as JSON.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_hanayo.checking.case import take_batches, topology_of
from lightning_hanayo.cli.common import condense, print_table
from lightning_hanayo.cli.trainer import WaveCLI, run_cli
from lightning_hanayo.errors import HanayoError, counted
from lightning_hanayo.planner.candidates import ALL, Choices
from lightning_hanayo.planner.estimates import Estimate, Measured, StepModel
from lightning_hanayo.planner.files import Profile
from lightning_hanayo.planner.machine import Machine, machine
from lightning_hanayo.planner.model_facts import ModelFacts
from lightning_hanayo.planner.ranking import TOO_LARGE, USABLE, Plan, bytes_of, count_of, make_plan, overlay, save_plan
from lightning_hanayo.plotting.layouts import Dot, save_layouts
from lightning_hanayo.plotting.pages import save_layouts_page
from lightning_hanayo.plotting.terminal_status import showing
from lightning_hanayo.strategy import HanayoStrategy
from lightning_hanayo.strategy.model_facts import read_batch
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.planning import given_layout

COLUMNS = (
    "#", "P", "W", "D", "cube", "batch", "schedule", "recompute", "sharded", "weights", "pairs", "experts",
    "outside", "step s", "bubble", "waits", "memory", "MFU",
)  # fmt: skip
_CHOICES = range(COLUMNS.index("schedule"), COLUMNS.index("step s"))
"""the columns that are left out where all rows are alike"""


def _of_experts(plan: Plan) -> str:
    """What is said of experts whose products autocast leaves in fp32."""
    found = {block.experts.dtype for block, _ in plan.facts.kinds if block.experts is not None}
    return "".join(
        f", those of experts in {dtype}{plan.machine.rate_note(dtype)}; precision='bf16-true' with "
        f"master_weights='fp32' computes them in 16 bits"
        for dtype in sorted(found - {plan.facts.dtype, ""})
    )


def show(plan: Plan, written: Sequence[str], configs: Sequence[str], *, sets_batch_size: bool) -> None:
    """Print it.

    Args:
        plan: what was planned.
        written: the files that hold it, the configuration first.
        configs: those that were read.
        sets_batch_size: whether the written one sets the batch size of the data.
    """
    facts, machine = plan.facts, plan.machine
    print(
        f"{count_of(facts.parameters)} parameters, {counted(len(facts.blocks), 'block')} ({facts.stack}), "
        f"{counted(facts.tokens, 'token')} per sample, {facts.flops / 1e12:.3g} TFLOP per sample, "
        f"products in {facts.dtype}{machine.rate_note(facts.dtype)}{_of_experts(plan)}\n"
        f"{plan.num_devices} x {machine.name}, {machine.ranks_per_node} per node; "
        f"{machine.source or 'rates of unknown origin'}\n"
        f"{counted(plan.global_batch, 'sample')} per step; at most {bytes_of(plan.memory)} per device\n"
    )
    table = rows(plan)
    alike = [i for i in _CHOICES if len({row[i] for row in table}) == 1]
    shown = [i for i in range(len(COLUMNS)) if i not in alike]
    print_table([COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in table])
    same = ", ".join(f"{COLUMNS[i]} {table[0][i]}" for i in alike if table[0][i] != "-")
    rate = "peak of the data sheet" if machine.peak else "highest rate measured"
    print(
        f"{f'in all: {same}. ' * bool(same)}batch: micro-batches x samples. waits: for other data ranks. "
        f"MFU: the model's own products, compared with the {rate}\n"
    )
    print(
        f"{plan.num_considered:,} layouts considered: {len(plan.fitting):,} fit, "
        f"{plan.refused[TOO_LARGE]:,} {TOO_LARGE}"
    )
    for reason, count in plan.refused.most_common():
        if reason != TOO_LARGE:
            print(f"not considered: {count:,}, {reason}")
    first, own = plan.first, plan.first.candidate
    batches = f" x {own.accumulate} batches" if own.accumulate > 1 else ""
    print(
        f"\nfastest: {first.seconds:.3g} s, {plan.global_batch / first.seconds * facts.tokens:,.0f} tokens/s. "
        f"{counted(own.data, 'data rank')} x {counted(own.num_microbatches, 'micro-batch')} x "
        f"{counted(own.samples, 'sample')}{batches} = {counted(own.samples_per_step, 'sample')} per step; "
        f"each data rank's DataLoader gives {own.batch_size}\n"
    )
    print(f"written: {', '.join(written)}")
    print(f"run it: hanayo fit {' '.join(f'--config {shlex.quote(path)}' for path in (*configs, written[0]))}")
    if not sets_batch_size:
        print(f"and set the DataLoader's batch_size to {own.batch_size}, which the plan can't")


def plain(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    return {
        "parameters": plan.facts.parameters,
        "num_blocks": len(plan.facts.blocks),
        "tokens_per_sample": plan.facts.tokens,
        "flops_per_sample": plan.facts.flops,
        "devices": plan.num_devices,
        "global_batch": plan.global_batch,
        "memory_limit": plan.memory,
        "machine": asdict(plan.machine),
        "considered": plan.num_considered,
        "fit": len(plan.fitting),
        "left_out": dict(plan.refused),
        "layouts": [
            asdict(one.candidate)
            | {
                "batch_size": one.candidate.batch_size,
                "seconds": one.seconds,
                "samples_per_second": plan.global_batch / one.seconds,
                "bubble": one.bubble,
                "exposed": one.exposed,
                "memory": asdict(one.memory) | {"total": one.memory.total},
                "mfu": plan.mfu(one),
            }
            for one in plan.best
        ],
    }


def rows(plan: Plan) -> list[list[str]]:
    """The table of the fastest layouts, each the fastest of its pipeline size and cube."""
    found = []
    for number, one in enumerate(plan.best, 1):
        own = one.candidate
        batch = f"{own.num_microbatches} x {own.samples}"
        batch = f"{own.accumulate} x ({batch})" if own.accumulate > 1 else batch
        sizes = own.data, "x".join(map(str, own.mesh)) if own.cube_size > 1 else "-", batch
        choices = (
            own.schedule if own.pipe > 1 else "-",
            "blocks" if own.recompute else "-",
            "yes" if own.shard_optimizer else "-",
            own.cube_weights if own.mesh[0] > 1 else "-",
            "yes" if own.pairs else "-",
            own.experts if own.experts != "whole" else "-",
            own.cube_outside if own.cube_outside != "share" else "-",
        )
        predicted = (
            f"{one.seconds:.3g}",
            f"{one.bubble:.1%}",
            f"{one.exposed / one.seconds:.1%}",
            bytes_of(one.memory.total),
            f"{plan.mfu(one):.1%}",
        )
        waves = own.num_waves if own.pipe > 1 else "-"
        row = number, own.pipe, waves, *sizes, *choices, *predicted
        found.append(list(map(str, row)))
    return found


def show_ranks(given: Estimate, limit: float, *, as_json: bool) -> None:
    """Print a layout's step, and the memory of each pipeline rank: of each rank of its cube, in all data ranks.

    Args:
        given: the layout, simulated.
        limit: bytes that a rank may need.
        as_json: print values.
    """
    ranks = [asdict(one) | {"total": one.total} for one in given.of_ranks]
    if as_json:
        layout = asdict(given.candidate)
        print(json.dumps({"layout": layout, "seconds": given.seconds, "memory_limit": limit, "ranks": ranks}, indent=2))
        return
    samples = counted(given.candidate.samples_per_step, "sample")
    print(f"{given.candidate.whole_name}: {given.seconds:.3g} s per step of {samples}\n")
    shown = [kind for kind in ranks[0] if any(one[kind] for one in ranks)]
    cells = [[bytes_of(one[kind]) if one[kind] else "-" for kind in shown] for one in ranks]
    print_table(["pipeline rank", *shown], [[str(rank), *row] for rank, row in enumerate(cells)])
    needed = given.memory.total
    fits = "fits" if needed <= limit else "does not fit"
    print(f"{bytes_of(needed)} on the rank that needs the most: it {fits} into {bytes_of(limit)} per device")


_PAIRS = {"auto": (False, True), "on": (True,), "off": (False,)}
"""the values of --pairs -> what to choose from"""


def run_plan(options: argparse.Namespace, rest: list[str]) -> int:
    """Plan what the options of `hanayo fit` in `rest` describe, and return the exit code."""
    if options.devices % options.nodes:
        raise HanayoError(f"--devices {options.devices}, of all nodes, don't divide over --nodes {options.nodes}")
    rates = machine(options.device) if options.device is not None else Machine.load(options.machine)
    rates = replace(rates, ranks_per_node=options.devices // options.nodes)
    run_cli(lambda: PlanCLI(options, rates, ["fit", *rest]))
    return 0


class PlanCLI(WaveCLI):
    """Builds what `fit` would train, on one CPU and without loggers, and plans its layout instead."""

    def __init__(self, options: argparse.Namespace, rates: Machine, args: list[str]) -> None:
        self._options = options
        self._machine = rates
        super().__init__(args)

    def before_instantiate_classes(self) -> None:
        """Have data built with values, wherever the model is built."""
        self.parser.add_instantiator(_on_cpu, LightningDataModule)

    def instantiate_classes(self) -> None:
        """Build model and data, the model without values: it may be too large for this machine."""
        try:
            with torch.device("meta"):
                super().instantiate_classes()
        except Exception:  # perhaps the model's __init__ computes with values; other errors come again
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build a Trainer for one process: the layout is not yet known."""
        self._config = self.config_init[self.subcommand]["trainer"]
        alone = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "32-true"}
        return super().instantiate_trainer(**kwargs | alone | {"logger": False, "plugins": None})

    def fit(self, model: Any, datamodule: Any = None, **_: Any) -> None:
        """Takes the place of `Trainer.fit`."""
        options, strategy = self._options, self._config["strategy"]
        is_hanayo = isinstance(strategy, HanayoStrategy)
        if options.given and not is_hanayo and strategy != "hanayo":
            raise HanayoError(f"--given: trainer.strategy is {strategy!r}; give HanayoStrategy, or leave it out")
        own = (strategy if is_hanayo else HanayoStrategy()).options
        with showing("planning") as say:
            say("reading the data")
            batch = _first_batch(model, datamodule)
            say("counting what the model computes")
            facts, num_samples = read_batch(model, batch, own, str(self._config["precision"] or "32-true"))
            step_model = StepModel(facts, self._machine, self._measured(num_samples, len(facts.blocks)))
            say("comparing layouts")
            if options.given:
                ranks, accumulate = topology_of(own, options.devices), self._config["accumulate_grad_batches"]
                layout = given_layout(own, ranks, facts, batch_size=num_samples, accumulate=accumulate)
                given = step_model.simulated(layout)
            else:
                plan = self._choose(facts, step_model, own, num_samples)
        if options.given:
            show_ranks(given, options.memory or USABLE * self._machine.memory, as_json=options.json)
        else:
            self._write(plan)

    def _choose(self, facts: ModelFacts, step_model: StepModel, own: Options, num_samples: int) -> Plan:
        """All layouts, compared."""
        options, batches = self._options, self._config["accumulate_grad_batches"] * self._data_ranks()
        weights = ALL.cube_weights if options.cube_weights == "auto" else (options.cube_weights,)
        outside = ALL.cube_outside if own.cube_outside == "share" else (own.cube_outside,)
        pairs, once = _pairs(options.pairs, facts, own), own.step == "batch"
        return make_plan(
            facts,
            self._machine,
            num_devices=options.devices,
            step=options.global_batch or batches * num_samples,
            memory=options.memory,
            top=options.top,
            model=step_model,
            choices=Choices(weights, pairs, once, cube_outside=outside),
        )

    def _data_ranks(self) -> int:
        """Those of the configuration; where it doesn't say how many processes it has, one."""
        strategy, devices, nodes = (self._config[name] for name in ("strategy", "devices", "num_nodes"))
        world = int(devices) * nodes if str(devices).isdecimal() else 1
        if not isinstance(strategy, HanayoStrategy):
            return 1 if strategy == "hanayo" else world
        options = strategy.options
        if isinstance(options.data_parallel_size, int):
            return options.data_parallel_size
        return topology_of(options, world).data

    def _measured(self, num_samples: int, num_blocks: int) -> Measured | None:
        if (path := self._options.profile) is None:
            return None
        profile = Profile.load(path)
        if sum(profile.blocks) != num_blocks or not profile.num_microbatches:
            sizes = f"it is of {sum(profile.blocks)} blocks and {profile.num_microbatches} micro-batches"
            raise HanayoError(f"--profile {path}: {sizes}; give that of a run with this model, of {num_blocks} blocks")
        return Measured.of(profile, num_samples / profile.num_microbatches)

    def _write(self, plan: Plan) -> None:
        """Write the configuration and the picture, and show the plan."""
        options = self._options
        configs = [str(one) for one in self.config[self.subcommand].get("config") or []]
        if Path(options.output).resolve() in (Path(one).resolve() for one in configs):
            raise HanayoError(f"--output {options.output}: that is the configuration itself; give another file")
        data = self.config[self.subcommand].get("data")
        sets_batch_size = data is not None and "batch_size" in (data.get("init_args") or {})
        accelerator = "gpu" if self._machine.is_asynchronous else None
        content = overlay(plan, num_nodes=options.nodes, accelerator=accelerator, sets_batch_size=sets_batch_size)
        picture = options.picture or str(Path(options.output).with_suffix(".png"))
        is_page = Path(picture).suffix.lower() == ".html"
        dots, numbered = (
            [Dot(one.seconds, one.memory.total, one.candidate.whole_name if is_page else "") for one in estimates]
            for estimates in (plan.fitting, plan.best)
        )
        title = f"{plan.num_devices} x {plan.machine.name}, {counted(plan.global_batch, 'sample')} per step"
        if is_page:
            save_layouts_page(picture, dots, numbered, limit=plan.memory, title=title, columns=COLUMNS, rows=rows(plan))
        else:
            save_layouts(picture, dots, numbered, limit=plan.memory, title=title)
        save_plan(options.output, plan, content)
        if options.json:
            print(json.dumps(plain(plan) | {"plan": options.output, "picture": picture}, indent=2))
        else:
            show(plan, (options.output, picture), configs, sets_batch_size=sets_batch_size)


def _pairs(given: str, facts: ModelFacts, options: Options) -> tuple[bool, ...]:
    """Whether layouts may have pairs: what `HanayoStrategy` accepts in a cube.

    Raises:
        HanayoError: they are asked for, and it would refuse them.
    """
    reason = ""
    if not facts.is_registered:
        reason = f"the blocks of {facts.stack} aren't registered"
    elif options.cube_outside == "tokens":
        reason = "cube_outside='tokens' starts collectives in user code"
    elif options.step == "batch":
        reason = "step='batch' runs code outside the stack on whole batches"
    if reason and given == "on":
        raise HanayoError(f"--pairs on: {reason}, and HanayoStrategy refuses pairs then; leave --pairs out")
    return (False,) if reason else _PAIRS[given]


def _on_cpu(cls: type[LightningDataModule], *args: Any, **kwargs: Any) -> LightningDataModule:
    with torch.device("cpu"):
        return cls(*args, **kwargs)


def _first_batch(model: LightningModule, datamodule: LightningDataModule | None) -> Any:
    """Of the training data."""
    try:
        return take_batches(model, datamodule, 1, torch.float32).batches[0]
    except HanayoError:
        raise
    except Exception as error:  # of the user's code
        raise HanayoError(f"the training data can't be read: {type(error).__name__}: {condense(str(error))}") from error
