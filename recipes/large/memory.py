"""Compares planned memory with what ranks hold, for models and layouts that are cut: `python -m recipes.large.memory`.

llama3-70b-64xh100    80 blocks of width 8192, P=4 W=2, cube 4x2x1, D=2
cut                   4 blocks of width 256,   P=1,     cube 2x2x1, D=1     4 processes on this machine
"""

import argparse
import json
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.planner.candidates import ONE_RANK, Candidate
from lightning_hanayo.planner.estimates import StepModel
from lightning_hanayo.planner.machine import machine
from lightning_hanayo.planner.ranking import strategy_options
from lightning_hanayo.strategy.model_facts import read_model
from recipes.benchmarks.harness import ORDINARY, run_ranks
from recipes.benchmarks.live_bytes import peak_of_fit
from recipes.large.module import CausalLM
from recipes.large.operations import Operations
from recipes.large.plans import CASES, FOLDER, PLANS, numbers_of

WIDTH, CONTEXT, WORDS = 256, 256, 2048
SAMPLES = 4
"""of a micro-batch for each rank of a cube: as many tokens as a chunk of the loss has"""
MOST_RANKS, MOST_WAVES = 4, 2
BLOCKS_OF_A_STAGE = 2
STEPS = 3
"""the third one is measured"""
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class CutLayout:
    """A planned layout, and its model, small enough for this machine."""

    model: str
    """of its file"""
    layout: Candidate

    @classmethod
    def of(cls, name: str, plan: dict[str, Any]) -> "CutLayout":
        """Cut a layout: D=1, at most four ranks, axes of at most two, and two micro-batches per pipeline rank."""
        own = Operations(CASES[name], plan).candidate
        x, y, z = (min(2, size) for size in own.mesh)
        mesh, pipe = (x, y, z), min(4, own.pipe)
        while prod(mesh) * pipe > MOST_RANKS:
            pipe //= 2
        count = min(own.num_microbatches, 2 * pipe if pipe > 1 else 4)
        sizes: dict[str, Any] = {"data": 1, "pipe": pipe, "mesh": mesh, "num_microbatches": count, "accumulate": 1}
        sizes["num_waves"] = min(MOST_WAVES, own.num_waves)
        if pipe == 1:
            sizes |= {"num_waves": 1, "schedule": ONE_RANK}
        return cls(CASES[name].model, replace(own, **sizes, samples=SAMPLES * prod(mesh), shard_optimizer=False))

    def module(self) -> CausalLM:
        """The model with the same ratios of widths, and two blocks for each stage."""
        given = yaml.safe_load((FOLDER / f"{self.model}.yaml").read_text(encoding="utf-8"))["model"]["init_args"]
        config = dict(given["config"])
        factor = (config.get("hidden_size") or config["n_embd"]) / WIDTH
        names = {"hidden_size", "intermediate_size", "moe_intermediate_size", "n_embd"} & config.keys()
        config |= {one: round(config[one] / factor / 16) * 16 for one in names}
        blocks = BLOCKS_OF_A_STAGE * self.layout.pipe * self.layout.stages_per_rank if self.layout.pipe > 1 else 4
        _, y, z = self.layout.mesh
        limits = {
            "num_hidden_layers": blocks, "n_layer": blocks, "num_attention_heads": 8, "n_head": 8, "head_dim": 32,
            "num_key_value_heads": max(2, y * z), "vocab_size": WORDS, "max_position_embeddings": CONTEXT,
            "n_positions": CONTEXT, "num_experts": 8, "num_experts_per_tok": 2,
        }  # fmt: skip
        config |= {one: size for one, size in limits.items() if one in config}
        if given["model_type"] == "gpt2":  # on CPUs dropout makes whole matrices of attention, and keeps masks in fp32
            config |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0}
        return CausalLM(given["model_type"], config)

    def planned(self) -> float:
        """Bytes of the fullest rank by the plan."""
        batch = {"input_ids": torch.zeros(1, CONTEXT, dtype=torch.long)}
        facts = read_model(self.module(), batch, 1, **numbers_of(self.model)._asdict())
        return StepModel(facts, machine("h100")).simulated(self.layout).memory.total

    def measured(self) -> float:
        """Bytes that the fullest of as many processes held."""
        ranks = self.layout.pipe * self.layout.cube_size
        found = run_ranks(partial(_fit, own=self), ranks, [ORDINARY] * ranks, TIMEOUT_S)
        return float(max(peak for _, peak in found))


def _fit(rank: int, num_ranks: int, *, own: CutLayout) -> int:
    torch.manual_seed(0)
    numbers = numbers_of(own.model)
    options = strategy_options(own.layout) | {"cube": own.layout.mesh, "step": "microbatch"} | numbers.options
    strategy = HanayoStrategy(**options)
    batches = [{"input_ids": torch.randint(WORDS, (own.layout.batch_size, CONTEXT))} for _ in range(STEPS)]
    return peak_of_fit(rank, num_ranks, own.module, batches, strategy=strategy, precision=numbers.precision)


def main() -> None:
    """Compare, and print a line for each layout."""
    parser = argparse.ArgumentParser(prog="python -m recipes.large.memory", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], help="layouts to compare (default: all)")
    plans = json.loads(PLANS.read_text(encoding="utf-8"))
    for name in parser.parse_args().names or list(CASES):
        own = CutLayout.of(name, plans[name])
        planned, measured = own.planned(), own.measured()
        sizes = f"{planned / 1e6:8.1f} {measured / 1e6:8.1f} MB {planned / measured - 1:+.1%}"
        print(f"{name:26} {own.layout!s:36} {sizes}", flush=True)


if __name__ == "__main__":
    main()
