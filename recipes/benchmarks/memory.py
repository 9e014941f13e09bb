"""Compares the memory that plans say ranks hold with what they held, and with other systems.

python -m recipes.benchmarks.memory --table docs/benchmarks/memory.md --json docs/benchmarks/memory.json
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from lightning_hanayo.planner.candidates import ONE_RANK, SPLIT, WHOLE, Candidate
from lightning_hanayo.planner.estimates import StepModel
from lightning_hanayo.planner.machine import machine
from lightning_hanayo.strategy.model_facts import read_model
from recipes.benchmarks.harness import (
    LOOPBACK,
    Columns,
    Findings,
    describe,
    new_parser,
    number,
    page,
    run,
    table,
    whole,
)
from recipes.benchmarks.memory_measured import Sizes, make_model, run_ours, run_peer
from recipes.benchmarks.memory_peers import SEVEN_B, Held, State, Task, best, ours, peers
from recipes.h100.models import MODELS
from recipes.paper.page import markdown

SAMPLES = 16
"""of a data rank's batch"""
IN_TWO = Candidate(pipe=2, schedule=WHOLE, samples=2, num_microbatches=8)
IN_FOUR = replace(IN_TWO, pipe=4)
IN_CUBE = Candidate(schedule=ONE_RANK, mesh=(2, 1, 1), samples=4, num_microbatches=4)
LAYOUTS = (
    replace(IN_TWO, samples=4, num_microbatches=4),
    replace(IN_TWO, num_waves=2),
    replace(IN_TWO, num_waves=2, schedule=SPLIT),
    replace(IN_TWO, recompute=True),
    IN_FOUR,
    replace(IN_FOUR, schedule=SPLIT),
    replace(IN_TWO, data=2, schedule=SPLIT, samples=4, num_microbatches=4, shard_optimizer=True),
    IN_CUBE,
    replace(IN_CUBE, mesh=(1, 2, 1), pipe=2, schedule=WHOLE),
)
CHECKED = (
    IN_FOUR,
    replace(IN_TWO, mesh=(1, 2, 1)),
    replace(IN_CUBE, mesh=(1, 2, 2)),
    replace(IN_CUBE, mesh=(1, 2, 2), cube_outside="tokens"),
    replace(IN_TWO, data=2, num_microbatches=4, shard_optimizer=True),
)
"""layouts whose bytes on paper are compared with measured ones, next to other systems"""
NUM_RANKS, SEQUENCES = 8, 8
SMALL_RANKS, SMALL_SEQUENCES = 4, 16

ABOUT = """\
The GPT recipe and a Llama of `transformers`: {blocks} blocks of width {width}, {words} words, batches of {samples}
sequences of {context} tokens for each data rank, AdamW in fp32. A peak is the most bytes of live tensors that a rank
held, from the start of a batch to the end of the optimizer's step; shown is the rank that held the most, as it decides
what fits. Other ranks of these small models hold up to a tenth more than planned: buffers of sent messages, which plans
leave out, and which a CPU keeps for the next ones."""
ABOUT_PEERS = f"""\
On paper: Llama-7B on {NUM_RANKS} ranks, a step of {SEQUENCES} sequences of 4,096 tokens, nothing recomputed; bytes of
the rank that holds the most. State is parameters in bf16, and gradients, master weights and Adam in fp32: 2 + 4 + 12
bytes per parameter (FSDP2's peak is at the loss, before it makes gradients). What a block keeps of a sequence, in each
cube, and what head and loss take, is counted on the meta device with flash attention; the loss is over whole logits,
except with `cube_outside="tokens"`, which divides them among ranks. Ours is what `hanayo plan` says.
Megatron-LM's formulas are those of arXiv 2205.05198, section 4.2. Memory of the allocator and of libraries comes on
top. Ours are the best layouts for each P, of all cubes and D, with W = 1 or 2, with and without shared tokens. In a
cube each rank has embedding and head whole while a batch runs, where TP = 8 has an eighth, unless it shares tokens."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the requested files. Returns the exit code."""
    parser = new_parser("memory", __doc__)
    parser.add_argument(
        "--models", nargs="*", default=["gpt", "llama"], choices=["gpt", "llama"], help="(default gpt llama)"
    )
    parser.add_argument("--layouts", type=whole, nargs="+", metavar="N", help="some of the layouts, numbered from 1")
    number(parser, "--width", 128, "of the models")
    number(parser, "--context", 256, "tokens of a sequence")
    parser.add_argument("--no-peers", action="store_true", help="leave other systems out")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    torch.set_num_threads(1)
    sizes = Sizes("gpt", options.width, options.context)
    cases = list(_cases(options, sizes))
    machine = describe(LOOPBACK)
    parts: list[str | Sequence[str]] = ["# Memory", machine]
    if cases:
        parts += ["## Planned and measured", ABOUT.format(**vars(sizes)), table(COLUMNS, cases)]
    data: dict[str, Any] = {"machine": machine, "cases": cases}
    if not options.no_peers:
        own, data["peers"] = _peers(replace(sizes, model="llama"))
        parts += own
    command = "python -m recipes.benchmarks.memory --table docs/benchmarks/memory.md --json docs/benchmarks/memory.json"
    return Findings(page(*parts, f"    {command}"), data)


def _cases(options: argparse.Namespace, sizes: Sizes) -> Iterator[dict[str, Any]]:
    for model in options.models:
        own = replace(sizes, model=model)
        ids = torch.zeros(SAMPLES, own.context, dtype=torch.long)
        facts = read_model(make_model(own), {"input_ids": ids, "labels": ids}, SAMPLES)
        planned = StepModel(facts, machine("h100"))
        for place, layout in enumerate(LAYOUTS, 1):
            if not options.layouts or place in options.layouts:
                of_ranks = [round(one.total) for one in planned.simulated(layout).of_ranks]
                measured = run_ours(own, layout)
                yield {"model": model, "layout": asdict(layout), "planned": of_ranks, "measured": measured}


COLUMNS: Columns = (
    ("model", lambda one: one["model"]),
    ("layout", lambda one: Candidate(**one["layout"]).whole_name),
    ("planned MB", lambda one: f"{max(one['planned']) / 1e6:.1f}"),
    ("measured MB", lambda one: f"{max(one['measured']) / 1e6:.1f}"),
    ("error", lambda one: f"{max(one['planned']) / max(one['measured']) - 1:+.1%}"),
)


def _peers(sizes: Sizes) -> tuple[list[str], dict[str, Any]]:
    """The comparison with other systems as text, and its figures."""
    task = Task(MODELS["7B"], SEQUENCES, torch.bfloat16, SEVEN_B)
    shown = sorted([*peers(task, NUM_RANKS), *best(task, NUM_RANKS)], key=lambda held: held.total)
    state = State(weight=4, gradient=4, optimizer=8)
    checked = list(_checked(sizes, Task(sizes.llama, SMALL_SEQUENCES, torch.float32, state)))
    rows = [
        (one.system, one.layout, *(f"{part / 1e9:.1f}" for part in (one.state, one.batch, one.total))) for one in shown
    ]
    small_rows = [
        (one.system, one.layout, f"{one.total / 1e6:.1f}", f"{measured / 1e6:.1f}", f"{one.total / measured - 1:+.1%}")
        for one, measured in checked
    ]
    text = [
        "## Compared with other systems",
        ABOUT_PEERS,
        markdown(("system", "layout", "state GB", "batch GB", "peak GB"), rows),
        f"The same on {SMALL_RANKS} ranks, for the Llama above ({SMALL_SEQUENCES} sequences in a step, fp32), and "
        "measured:",
        markdown(("system", "layout", "on paper MB", "measured MB", "error"), small_rows),
    ]
    figures = {
        "7B": [asdict(one) for one in shown],
        "small": [asdict(one) | {"measured": measured} for one, measured in checked],
    }
    return text, figures


def _checked(sizes: Sizes, task: Task) -> Iterator[tuple[Held, int]]:
    """What can be measured here: bytes on paper, and measured ones."""
    for held in peers(task, SMALL_RANKS)[:2]:
        own = replace(sizes, samples=SMALL_SEQUENCES // SMALL_RANKS)
        yield held, run_peer(own, held.system, SMALL_RANKS)
    for layout in CHECKED:
        assert layout.topology.world_size == SMALL_RANKS
        yield ours(task, layout), max(run_ours(replace(sizes, samples=layout.batch_size), layout))


if __name__ == "__main__":
    sys.exit(main())
