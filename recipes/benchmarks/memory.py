"""Compares the memory that ranks were predicted to hold with what they held, and with other systems.

python -m recipes.benchmarks.memory --table docs/benchmarks/memory.md --json docs/benchmarks/memory.json
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

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
from recipes.benchmarks.memory_measured import Sizes, llama_features, run_ours, run_peer, world_size
from recipes.benchmarks.memory_peers import SEVEN_B, Held, State, Task, best, describe_layout, ours, peers
from recipes.h100.models import MODELS, Llama
from recipes.paper.page import markdown

LAYOUTS: Sequence[Mapping[str, Any]] = (
    {"pipeline_parallel_size": 2, "schedule": "1f1b", "num_microbatches": 8},
    {"pipeline_parallel_size": 2, "num_waves": 1, "schedule": "hanayo", "num_microbatches": 4},
    {"pipeline_parallel_size": 2, "num_waves": 2, "schedule": "hanayo", "num_microbatches": 8},
    {"pipeline_parallel_size": 2, "num_waves": 2, "schedule": "hanayo-zb", "num_microbatches": 8},
    {"pipeline_parallel_size": 2, "num_waves": 1, "schedule": "hanayo", "num_microbatches": 8, "recompute": "blocks"},
    {"pipeline_parallel_size": 4, "schedule": "1f1b", "num_microbatches": 8},
    {"pipeline_parallel_size": 4, "num_waves": 1, "schedule": "hanayo", "num_microbatches": 8},
    {"pipeline_parallel_size": 4, "num_waves": 1, "schedule": "hanayo-zb", "num_microbatches": 8},
    {"pipeline_parallel_size": 2, "num_waves": 1, "schedule": "hanayo-zb", "num_microbatches": 4,
     "data_parallel_size": 2, "shard_optimizer": True},
    {"pipeline_parallel_size": 1, "cube": (2, 1, 1), "num_microbatches": 4},
    {"pipeline_parallel_size": 1, "cube": (1, 2, 1), "num_microbatches": 4, "cube_memory": "shards"},
    {"pipeline_parallel_size": 2, "num_waves": 1, "schedule": "hanayo", "cube": (1, 2, 1), "num_microbatches": 4},
)  # fmt: skip
CHECKED: Sequence[tuple[Mapping[str, Any], int]] = (
    ({"pipeline_parallel_size": 4, "num_waves": 1, "schedule": "hanayo"}, 2),
    ({"pipeline_parallel_size": 2, "num_waves": 1, "schedule": "hanayo", "cube": (1, 2, 1)}, 2),
    ({"pipeline_parallel_size": 1, "cube": (1, 2, 2)}, 4),
    ({"pipeline_parallel_size": 1, "cube": (1, 2, 2), "cube_outside": "tokens"}, 1),
    ({"pipeline_parallel_size": 2, "num_waves": 1, "schedule": "hanayo", "data_parallel_size": 2,
      "shard_optimizer": True}, 2),
)  # fmt: skip
"""layouts, and sequences per micro-batch, whose bytes on paper are compared with measured ones"""
NUM_RANKS, SEQUENCES = 8, 8
SMALL_RANKS, SMALL_SEQUENCES = 4, 16

ABOUT = """\
The GPT recipe and a Llama of `transformers`: {blocks} blocks of width {width}, {words} words, batches of {samples}
sequences of {context} tokens for each data rank, AdamW in fp32. A peak is the most bytes of live tensors that a rank
held, from the start of a batch to the end of the optimizer's step; shown is the rank that held the most. The prediction
takes sizes of parameters, what one micro-batch was measured to take in each stage, and the order of the actions."""
ABOUT_PEERS = f"""\
On paper: Llama-7B on {NUM_RANKS} ranks, a step of {SEQUENCES} sequences of 4,096 tokens, nothing recomputed; bytes of
the rank that holds the most. State is parameters in bf16, and gradients, master weights and Adam in fp32: 2 + 4 + 12
bytes per parameter (FSDP2's peak is at the loss, before it makes gradients). What a block keeps of a sequence, in each
cube, and what head and loss take, is counted on the meta device with flash attention; the loss is over whole logits,
except with `cube_outside="tokens"`, which divides them among ranks.
Megatron-LM's formulas are those of arXiv 2205.05198, section 4.2. Memory of the allocator and of libraries comes on
top. Ours are the best layouts for each P, of all cubes and D, with `hanayo` and W = 1 or 2, with and without shared
tokens. In a cube each rank has embedding and head whole while a batch runs, where TP = 8 has an eighth."""


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
        parts += ["## Predicted and measured", ABOUT.format(**vars(sizes)), table(COLUMNS, map(_Row, cases))]
    data: dict[str, Any] = {"machine": machine, "cases": cases}
    if not options.no_peers:
        own, data["peers"] = _peers(replace(sizes, model="llama"))
        parts += own
    command = "python -m recipes.benchmarks.memory --table docs/benchmarks/memory.md --json docs/benchmarks/memory.json"
    return Findings(page(*parts, f"    {command}"), data)


def _cases(options: argparse.Namespace, sizes: Sizes) -> Iterator[dict[str, Any]]:
    for model in options.models:
        for place, layout in enumerate(LAYOUTS, 1):
            if not options.layouts or place in options.layouts:
                ranks = run_ours(replace(sizes, model=model), layout)
                yield {"model": model, "layout": layout, "ranks": ranks}


class _Row:
    """A layout, and the rank that holds the most of it."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.model, self.layout = case["model"], describe_layout(case["layout"])
        self.fullest = max(case["ranks"], key=lambda rank: rank["measured_peak"])
        self.worst = max((rank["error"] for rank in case["ranks"]), key=abs)


COLUMNS: Columns = (
    ("model", lambda one: one.model),
    ("layout", lambda one: one.layout),
    ("predicted MB", lambda one: f"{one.fullest['predicted_peak'] / 1e6:.1f}"),
    ("measured MB", lambda one: f"{one.fullest['measured_peak'] / 1e6:.1f}"),
    ("greatest error of a rank", lambda one: f"{one.worst:+.1%}"),
)


def _peers(sizes: Sizes) -> tuple[list[str], dict[str, Any]]:
    """The comparison with other systems as text, and its figures."""
    task = Task(MODELS["7B"], SEQUENCES, torch.bfloat16, SEVEN_B)
    shown = sorted([*peers(task, NUM_RANKS), *best(task, NUM_RANKS)], key=lambda held: held.total)
    of_heads, words = (sizes.heads, sizes.heads), sizes.words
    small = Llama("small", sizes.blocks, sizes.width, llama_features(sizes.width), *of_heads, words, sizes.context)
    state = State(weight=4, gradient=4, optimizer=8)
    checked = list(_checked(sizes, Task(small, SMALL_SEQUENCES, torch.float32, state, keeps_buffers=True)))
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
    for layout, samples in CHECKED:
        assert world_size(layout) == SMALL_RANKS
        of_rank = SMALL_SEQUENCES // layout.get("data_parallel_size", 1)
        ranks = run_ours(replace(sizes, samples=of_rank), {**layout, "num_microbatches": of_rank // samples})
        yield ours(task, layout, samples), max(rank["measured_peak"] for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
