"""Measures one block of each large model at full width on a GPU, and steps, compared with what the planner predicts.

python -m recipes.benchmarks.large_blocks --json large-blocks.json --table large-blocks.md
python -m recipes.benchmarks.large_blocks --toy --models llama3-8b      # at a tiny width, on a CPU too
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from lightning import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.planner.block_time import time_block
from lightning_hanayo.planner.candidates import ONE_RANK, Candidate
from lightning_hanayo.planner.estimates import StepModel
from lightning_hanayo.planner.machine import KNOWN, machine
from lightning_hanayo.strategy.model_facts import read_model
from recipes.benchmarks.fits import new_trainer
from recipes.benchmarks.gpu.card import Card, find_card
from recipes.benchmarks.harness import (
    Columns,
    Findings,
    Summary,
    describe,
    ms,
    new_parser,
    number,
    page,
    read,
    run,
    stored,
    table,
)
from recipes.large.module import CausalLM
from recipes.large.plans import Numbers, numbers_of

FOLDER = Path(__file__).parents[1] / "large"
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "gpt-175b", "qwen3-30b-a3b", "qwen3-235b-a22b")
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "n_embd": 64, "n_head": 4,
    "max_position_embeddings": 32, "n_positions": 32,
}  # fmt: skip
VOCABULARY = 512
"""tokens: the embedding isn't measured"""
WARM_UP = 3
MICROBATCHES = 4
MOST = 0.8
"""of the device's memory that a fit is planned for"""
READING = """\
One sequence of the model's whole context runs forward and backward through one block, as the model's configuration
trains it: in bf16-mixed, those with experts in bf16-true. Planned are the times by which `hanayo plan` chooses layouts,
from the device's data sheet; "kept" is what a micro-batch's forward keeps for its backward, with its input and the
copies of weights that autocast makes."""

FITS = f"""\
Whole models with their full width and vocabulary, and as many blocks as fit, under the strategy on this one device:
{MICROBATCHES} micro-batches of one sequence, AdamW in fp32, in the model's own precision. The peak is that of torch's
allocator."""


@dataclass(frozen=True)
class BlockFigures:
    """One block, one micro-batch of one sequence: seconds and bytes."""

    model: str
    context: int
    parameters: int
    flops: float
    """of a forward"""
    forward: Summary
    backward: Summary
    kept: int
    planned_forward: float
    planned_backward: float
    planned_kept: float

    @property
    def of_plan(self) -> float:
        """The measured time over the planned one."""
        return (self.forward.median + self.backward.median) / (self.planned_forward + self.planned_backward)


@dataclass(frozen=True)
class FitFigures:
    """Optimizer steps of a model with as many blocks of full width as fit: seconds, and bytes at the peak."""

    model: str
    context: int
    num_blocks: int
    parameters: int
    seconds: Summary
    peak: int
    planned_seconds: float
    planned_peak: float


@dataclass
class Figures:
    """Of all models that were measured."""

    machine: list[str]
    blocks: list[BlockFigures] = field(default_factory=list)
    fits: list[FitFigures] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


COLUMNS: Columns = (
    ("a block of", lambda one: f"`{one.model}`"),
    ("tokens", lambda one: f"{one.context:,}"),
    ("parameters", lambda one: f"{one.parameters / 1e6:,.0f} M"),
    ("forward ms", lambda one: ms(one.forward.median, 2)),
    ("planned", lambda one: ms(one.planned_forward, 2)),
    ("backward ms", lambda one: ms(one.backward.median, 2)),
    ("planned", lambda one: ms(one.planned_backward, 2)),
    ("both, of the plan", lambda one: f"{one.of_plan:.2f}"),
    ("kept GB", lambda one: f"{one.kept / 1e9:.2f}"),
    ("planned", lambda one: f"{one.planned_kept / 1e9:.2f}"),
    ("of the plan", lambda one: f"{one.kept / one.planned_kept:.2f}"),
)
FIT_COLUMNS: Columns = (
    ("model", lambda one: f"`{one.model}`"),
    ("blocks", lambda one: str(one.num_blocks)),
    ("parameters", lambda one: f"{one.parameters / 1e6:,.0f} M"),
    ("step ms", lambda one: ms(one.seconds.median)),
    ("planned", lambda one: ms(one.planned_seconds)),
    ("of the plan", lambda one: f"{one.seconds.median / one.planned_seconds:.2f}"),
    ("peak GB", lambda one: f"{one.peak / 1e9:.2f}"),
    ("planned", lambda one: f"{one.planned_peak / 1e9:.2f}"),
    ("of the plan", lambda one: f"{one.peak / one.planned_peak:.3f}"),
)


def text(figures: Figures) -> str:
    """The page."""
    failures = [f"{model} failed: {why}" for model, why in figures.failed.items()]
    blocks, fits = table(COLUMNS, figures.blocks), table(FIT_COLUMNS, figures.fits)
    return page("# Blocks of large models", figures.machine, READING, blocks, "## Steps", FITS, fits, failures)


def measure(model: str, card: Card, device: str, rounds: int, *, toy: bool) -> BlockFigures:
    """Predict and measure one block of a model."""
    numbers = numbers_of(model)
    is_mixed = numbers.precision.endswith("mixed")
    module = _module(model, 2, toy=toy)  # one block is no stack
    context: int = module.config.max_position_embeddings
    facts = read_model(module, {"input_ids": torch.zeros(1, context, dtype=torch.long)}, 1, **numbers._asdict())
    block = facts.blocks[0]
    planned = time_block(block, (1, 1, 1), 1, machine(device), facts.dtype, facts.element).alone
    own = block.of_a_rank(1, (1, 1, 1), element=facts.element)
    kept = own.saved + facts.element * own.cast
    called = _first_call(_module(model, 1, toy=toy), torch.float32 if is_mixed else torch.bfloat16, context, card)
    autocast = torch.autocast(card.device.type, torch.bfloat16, enabled=is_mixed)
    forwards, backwards, held = _times(*called, autocast, card, rounds)
    return BlockFigures(model, context, block.parameters, block.flops, Summary.of(forwards), Summary.of(backwards),
                        held, planned.forward, planned.backward, kept)  # fmt: skip


def measure_fit(model: str, card: Card, device: str, rounds: int, *, toy: bool) -> FitFigures | None:
    """Predict and measure optimizer steps of a model with at most eight blocks; None: two don't fit."""
    candidate, numbers = Candidate(num_microbatches=MICROBATCHES, schedule=ONE_RANK), numbers_of(model)
    for num_blocks in (8, 6, 4, 3, 2):
        module = _module(model, num_blocks, VOCABULARY if toy else None, toy=toy)
        context: int = module.config.max_position_embeddings
        batch = {"input_ids": torch.zeros(1, context, dtype=torch.long)}
        facts = read_model(module, batch, 1, **numbers._asdict())
        planned = StepModel(facts, machine(device)).simulated(candidate)
        if planned.memory.total <= MOST * card.capacity:
            break
    else:
        return None
    seconds, peak = _steps(module, numbers, context, card, rounds)
    parameters = round(sum(block.parameters for block in facts.blocks)) + facts.outside_parameters
    return FitFigures(model, context, num_blocks, parameters, Summary.of(seconds), peak, planned.seconds,
                      planned.memory.total)  # fmt: skip


class _Steps(Callback):
    """Times steps, and looks how much memory the last ones take."""

    def __init__(self, card: Card) -> None:
        self.seconds: list[float] = []
        self._card = card

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._card.synchronize()
        self._start = time.perf_counter()
        if len(self.seconds) == WARM_UP:
            self._card.reset_peak()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._card.synchronize()
        self.seconds.append(time.perf_counter() - self._start)


def _steps(module: CausalLM, numbers: Numbers, context: int, card: Card, rounds: int) -> tuple[list[float], int]:
    steps, words = _Steps(card), module.config.vocab_size
    with card.device:
        module.configure_model()
    batches = [{"input_ids": torch.randint(words, (MICROBATCHES, context))} for _ in range(WARM_UP + rounds)]
    strategy = HanayoStrategy(num_microbatches=MICROBATCHES, step="microbatch", **numbers.options)
    trainer = new_trainer(
        accelerator=card.accelerator, devices=1, strategy=strategy, precision=numbers.precision, callbacks=[steps]
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return steps.seconds[WARM_UP:], card.peak_memory


def _module(model: str, num_blocks: int, words: int | None = VOCABULARY, *, toy: bool) -> CausalLM:
    given = yaml.safe_load((FOLDER / f"{model}.yaml").read_text(encoding="utf-8"))["model"]["init_args"]
    changes = {
        "num_hidden_layers": num_blocks,
        "n_layer": num_blocks,
        "vocab_size": words or given["config"]["vocab_size"],
    }
    changes |= SMALL if toy else {}
    return CausalLM(given["model_type"], given["config"] | {k: v for k, v in changes.items() if k in given["config"]})


class _Reached(Exception):
    """The block is called."""


def _first_call(module: CausalLM, dtype: torch.dtype, context: int, card: Card) -> tuple[nn.Module, Any, Any]:
    """The only block, with random values of this type, and the arguments of its call."""
    with card.device:
        module.configure_model()
        module.to(dtype)
        tokens = torch.randint(VOCABULARY, (1, context))
    name = next(name for name, one in module.named_modules() if isinstance(one, nn.ModuleList) and len(one) == 1)
    block = module.get_submodule(f"{name}.0")
    found: list[Any] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.extend((args, kwargs))
        raise _Reached

    with block.register_forward_pre_hook(note, with_kwargs=True), suppress(_Reached):
        module.training_step({"input_ids": tokens}, 0)
    args, kwargs = tree_map_only(Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), found)
    return block, args, kwargs


def _times(
    block: nn.Module, args: Any, kwargs: Any, autocast: torch.autocast, card: Card, rounds: int
) -> tuple[list[float], list[float], int]:
    """Seconds of forwards and backwards, and bytes that a forward keeps: with the block's input, without its output."""
    forwards, backwards, held = [], [], 0
    found: list[Any] = []

    def forward() -> None:
        with autocast:
            found.append(block(*args, **kwargs))

    for _ in range(-WARM_UP, rounds):
        before = card.memory
        forwards.append(card.seconds_of(forward))
        out = tree_leaves(found.pop())[0]
        held = card.memory - before - out.nbytes + tree_leaves(args)[0].nbytes
        backwards.append(card.seconds_of(partial(out.backward, torch.ones_like(out))))
        del out
    return forwards[WARM_UP:], backwards[WARM_UP:], held


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    parser = new_parser("large_blocks", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    number(parser, "--rounds", 10, "the median is shown")
    parser.add_argument("--toy", action="store_true", help="tiny widths, which also run on a CPU: for trying it out")
    parser.add_argument("--again", type=Path, metavar="FILE.json", help="measure nothing: format the figures in it")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    figures = stored(options.again, partial(read, Figures)) if options.again else _figures(options)
    return Findings(text(figures), asdict(figures))


def _figures(options: argparse.Namespace) -> Figures:
    card = find_card(toy=options.toy)
    device = next((name for name in KNOWN if name.upper() in card.name.upper().split()), "h100")
    figures = Figures(describe(card.about, f"planned for: {device}"))
    for model in options.models:
        for kind, into in ((measure, figures.blocks), (measure_fit, figures.fits)):
            try:
                one: Any = kind(model, card, device, options.rounds, toy=options.toy)
            except Exception as error:
                figures.failed[model] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                print(f"{model} failed: {figures.failed[model]}", file=sys.stderr, flush=True)
                continue
            finally:
                gc.collect()
            if one is not None:
                into.append(one)
                print(one, file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(asdict(figures)))
    return figures


if __name__ == "__main__":
    sys.exit(main())
