"""Shows a plan: a table, what it was made of, what was left out, and how to run it; or all of it as JSON."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_hanayo.cli.tables import print_table
from lightning_hanayo.planner.estimates.step_time import Estimate
from lightning_hanayo.planner.machine import Machine
from lightning_hanayo.planner.ranking import TOO_LARGE, Plan, bytes_of, count_of

COLUMNS = (
    "#", "P", "W", "D", "cube", "B", "samples", "batches", "schedule", "recompute", "sharded", "weights", "pairs",
    "step s", "samples/s", "bubble", "exposed", "memory", "products",
)  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """What was written, and from which configurations."""

    output: str
    picture: str
    configs: Sequence[str]
    sets_batch_size: bool
    """whether the written file sets the batch size of the data"""


def show(plan: Plan, written: Shown, *, as_json: bool) -> None:
    """Print it."""
    if as_json:
        print(json.dumps(plain(plan) | {"plan": written.output, "picture": written.picture}, indent=2))
        return
    facts, machine = plan.facts, plan.machine
    print(
        f"{count_of(facts.parameters)} parameters, {len(facts.blocks)} blocks ({facts.stack}), "
        f"{facts.tokens} tokens per sample, {facts.flops / 1e12:.3g} TFLOP per sample, products in {facts.dtype}\n"
        f"{plan.num_devices} x {machine.name}, {machine.ranks_per_node} per node; {_source(machine)}\n"
        f"{plan.global_batch} samples per step; at most {bytes_of(plan.memory)} per device\n"
    )
    print_table(COLUMNS, rows(plan))
    print(
        "samples: of a micro-batch. weights: how often a cube gathers them. pairs: two micro-batches at once. "
        "exposed: waiting for other data ranks. products: the time of the model's own ones\n"
    )
    print(
        f"{plan.num_considered:,} layouts considered: {len(plan.points):,} fit, {plan.refused[TOO_LARGE]:,} {TOO_LARGE}"
    )
    for reason, count in plan.refused.most_common():
        if reason != TOO_LARGE:
            print(f"not considered: {count:,}, {reason}")
    print(f"\n{_summary(plan)}\n")
    print(f"written: {written.output}, {written.picture}")
    configs = " ".join(f"--config {shlex.quote(path)}" for path in (*written.configs, written.output))
    print(f"run it: hanayo fit {configs}")
    if not written.sets_batch_size:
        print(f"and set the DataLoader's batch_size to {plan.first.candidate.batch_size}, which the plan can't")


def plain(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    machine = asdict(plan.machine) | {"matmul": {name: list(map(list, t)) for name, t in plan.machine.matmul.items()}}
    return {
        "parameters": plan.facts.parameters,
        "num_blocks": len(plan.facts.blocks),
        "tokens_per_sample": plan.facts.tokens,
        "flops_per_sample": plan.facts.flops,
        "devices": plan.num_devices,
        "global_batch": plan.global_batch,
        "memory_limit": plan.memory,
        "machine": machine,
        "considered": plan.num_considered,
        "fit": len(plan.points),
        "left_out": dict(plan.refused),
        "layouts": [_plain(one, plan) for one in plan.best],
    }


def _plain(estimate: Estimate, plan: Plan) -> dict[str, Any]:
    candidate = estimate.candidate
    return asdict(candidate) | {
        "batch_size": candidate.batch_size,
        "seconds": estimate.seconds,
        "samples_per_second": plan.global_batch / estimate.seconds,
        "bubble": estimate.bubble,
        "exposed": estimate.exposed,
        "memory": asdict(estimate.memory) | {"total": estimate.memory.total},
        "of_peak": plan.flops_share(estimate),
    }


def rows(plan: Plan) -> list[list[str]]:
    """The table of the fastest layouts."""
    return [_row(number, one, plan) for number, one in enumerate(plan.best, 1)]


def _row(number: int, one: Estimate, plan: Plan) -> list[str]:
    own = one.candidate
    return [
        str(number),
        str(own.pipe),
        str(own.num_waves) if own.pipe > 1 else "-",
        str(own.data),
        "x".join(map(str, own.mesh)) if own.cube_size > 1 else "-",
        str(own.num_microbatches),
        str(own.samples),
        str(own.accumulate),
        own.schedule if own.pipe > 1 else "-",
        "blocks" if own.recompute else "-",
        "yes" if own.shard_optimizer else "-",
        f"per {own.cube_weights}" if own.mesh[0] > 1 else "-",
        "yes" if own.pairs else "-",
        f"{one.seconds:.3g}",
        f"{plan.global_batch / one.seconds:.4g}",
        f"{one.bubble:.1%}",
        f"{one.exposed / one.seconds:.1%}",
        bytes_of(one.memory.total),
        f"{plan.flops_share(one):.1%}",
    ]


def _summary(plan: Plan) -> str:
    """What the first is, in words."""
    first, own = plan.first, plan.first.candidate
    batches = f" x {own.accumulate} batches" if own.accumulate > 1 else ""
    return (
        f"fastest: {first.seconds:.3g} s, {plan.global_batch / first.seconds * plan.facts.tokens:,.0f} tokens/s. "
        f"{own.data} data ranks x {own.num_microbatches} micro-batches x {own.samples} samples{batches} = "
        f"{own.samples_per_step} samples per step; each data rank's DataLoader gives {own.batch_size}"
    )


def _source(machine: Machine) -> str:
    return machine.source or "rates of unknown origin"
