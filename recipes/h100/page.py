"""The table of expected step times, and the page around it: `docs/benchmarks/h100.md`."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from lightning_hanayo.divisibility import MeshSizes
from recipes.cube.meshes import TransformerLayer, best_mesh
from recipes.h100.counts import BlockCounts, Pass, count_block
from recipes.h100.models import MODELS, Llama
from recipes.h100.step import Step
from recipes.paper.page import fill, markdown, percent

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PAGE, COUNTS = FOLDER / "h100.md", FOLDER / "h100.json"
CASES = (("7B", 8, 64), ("7B", 64, 256), ("7B", 512, 1024), ("70B", 64, 256), ("70B", 512, 1024))
"""model, GPUs, sequences in a batch"""
CUBES, PIPES = (1, 2, 4, 8), (1, 2, 4, 8, 16)
HEAD = (
    "GPUs", "P x W", "D", "cube", "B", "tokens", "step s", "tokens/s per GPU", "of peak", "bubble", "GB",
    "host / device", "from tokens",
)  # fmt: skip


def rebuild() -> None:
    """Count all blocks again, and replace the tables."""
    meshes = {(name, mesh_of(MODELS[name], ranks)) for name in MODELS for ranks in CUBES}
    counted = {_key(name, mesh): asdict(count_block(MODELS[name], mesh, mesh[0])) for name, mesh in sorted(meshes)}
    COUNTS.write_text(json.dumps(counted, indent=1) + "\n", encoding="utf-8")
    counts_of.cache_clear()
    blocks = {"counts": counts_table()} | {block_name(*case): table(*case) for case in CASES}
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), blocks), encoding="utf-8")


def block_name(model: str, num_gpus: int, sequences: int) -> str:
    """The name of a case's table in the page."""
    return f"{model}-{num_gpus}"


def mesh_of(model: Llama, num_ranks: int) -> MeshSizes:
    """The mesh that communicates the least for one sequence."""
    layer = TransformerLayer(model.length, model.hidden, model.heads, model.features / model.hidden)
    return best_mesh(num_ranks, layer)


@cache
def counts_of(name: str, mesh: MeshSizes) -> BlockCounts:
    """What was counted when the page was made, for one sequence per rank along x."""
    plain: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8"))[_key(name, mesh)]
    return BlockCounts(Pass(**plain["forward"]), Pass(**plain["backward"]), plain["saved"])


def counts_table() -> str:
    """The block `counts`: one block, forward and backward."""
    rows = []
    for name, model in MODELS.items():
        for mesh in (mesh_of(model, ranks) for ranks in CUBES):
            one = counts_of(name, mesh)
            passes = one.forward, one.backward
            cells = [f"{p.calls} / {p.collectives} / {p.received / 1e6:.0f} / {p.flops / 1e12:.2f}" for p in passes]
            rows.append((name, "x".join(map(str, mesh)), *cells, f"{one.saved / 1e6:.0f}"))
    return markdown(("model", "cube", "forward", "backward", "MB saved"), rows)


def table(name: str, num_gpus: int, sequences: int) -> str:
    """The block of a case: for each size of cube the fastest layout that fits into memory, the fastest in bold."""
    steps = fastest(name, num_gpus, sequences)
    best = min((step.seconds for step in steps), default=0.0)
    return markdown(HEAD, [_row(step, is_best=step.seconds == best) for step in steps])


def fastest(name: str, num_gpus: int, sequences: int) -> list[Step]:
    """For each size of cube the fastest layout that fits into memory, if any does."""
    found = []
    for ranks in CUBES:
        fitting = [step for step in _steps(MODELS[name], num_gpus, sequences, ranks) if step.fits]
        found += [min(fitting, key=lambda step: step.seconds)] if fitting else []
    return found


def _steps(model: Llama, num_gpus: int, sequences: int, ranks: int) -> Iterator[Step]:
    mesh = mesh_of(model, ranks)
    for pipe in PIPES:
        data, rest = divmod(num_gpus, pipe * ranks)
        if not rest and sequences >= pipe * data * mesh[0]:
            yield Step(model, pipe, data, mesh, mesh[0], sequences, counts_of(model.name, mesh))


def _row(step: Step, *, is_best: bool) -> list[str]:
    seconds = f"{step.seconds:.2f}"
    return [
        str(step.num_gpus),
        f"{step.pipe} x {step.layout.num_waves}" if step.pipe > 1 else "1",
        str(step.data),
        "x".join(map(str, step.mesh)) if prod(step.mesh) > 1 else "-",
        str(step.num_microbatches),
        f"{step.tokens // 1024}k",
        f"**{seconds}**" if is_best else seconds,
        f"{step.tokens_per_second:,.0f}",
        percent(step.utilization),
        percent(step.timeline.bubble_ratio),
        f"{step.memory / 1e9:.0f}",
        f"**{step.host_share:.2f}**" if step.host_share > 1 else f"{step.host_share:.2f}",
        f"{step.tokens_for_the_device / 1000:.1f}k",
    ]


def _key(name: str, mesh: MeshSizes) -> str:
    return f"{name} {'x'.join(map(str, mesh))}"
