"""Compares what a rank holds with DDP, FSDP2, Megatron-LM's ways and ours, on paper, and where it can be measured.

Ours are what a plan says. The others:

One step of `sequences` sequences on N ranks, of a Llama with L blocks of P_b parameters, and P_o in embedding and head.

    DDP        state (L P_b + P_o)                     + sequences / N at once: L blocks, head and loss
    FSDP2      state (L P_b + P_o) / N + whole P_o     + the same
    TP = N     state (L P_b + P_o) / N                 + one sequence at once, 1/N of everything (sequence parallelism)
    PP = N     state (L P_b / N + P_o / 2)             + N sequences at once in L / N blocks (rank 0, 1F1B)

The last two: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
section 4.2, with the bytes of a block counted on the meta device, at any size, instead of 34 s b h.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hanayo.planner.candidates import ALL, Candidate, Choices, candidates
from lightning_hanayo.planner.estimates import StepModel
from lightning_hanayo.planner.machine import machine
from lightning_hanayo.strategy.model_facts import read_model
from recipes.benchmarks.live_bytes import LiveBytes
from recipes.benchmarks.memory_measured import make_llama
from recipes.h100.models import Llama


@dataclass(frozen=True)
class Part:
    """Bytes of one micro-batch in one part of a model, on one rank."""

    kept: int
    """from its forward to its backward, with its input"""
    output: int
    forward: int
    """the most during the forward, beyond what is kept then"""
    backward: int
    """the most during the backward, beyond what was kept"""


@cache
def count_block(model: Llama, samples: int, dtype: torch.dtype) -> Part:
    """A block. `samples` are sequences of the model's length."""
    one, rotary = model.block().to(dtype), tuple(part.to(dtype) for part in model.rotary())

    def forward(inputs: Tensor) -> Tensor:
        output: Tensor = one(inputs, position_embeddings=rotary)
        return output

    shape = samples, model.length, model.hidden
    return _count(forward, shape, dtype, [*one.parameters(), *rotary])


@cache
def count_outside(model: Llama, samples: int, dtype: torch.dtype) -> Part:
    """The last norm, the head and the loss, as in `LlamaForCausalLM`."""
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with torch.device("meta"):
        norm, head = LlamaRMSNorm(model.hidden).to(dtype), torch.nn.Linear(model.hidden, model.vocabulary, bias=False)
        head = head.to(dtype)
        labels = torch.empty((samples, model.length), dtype=torch.long)

    def forward(inputs: Tensor) -> Tensor:
        loss: Tensor = ForCausalLMLoss(head(norm(inputs)), labels, model.vocabulary)
        return loss

    shape = samples, model.length, model.hidden
    return _count(forward, shape, dtype, [*norm.parameters(), *head.parameters(), labels])


@cache
def step_model(model: Llama, precision: str) -> StepModel:
    """Plans the Llama, with master weights if its weights are in bf16."""
    ids = torch.zeros(1, model.length, dtype=torch.long)
    with torch.device("meta"):
        module = make_llama(model)
    batch = {"input_ids": ids, "labels": ids}
    facts = read_model(module, batch, 1, precision=precision, master_weights=precision == "bf16-true")
    return StepModel(facts, machine("h100"))


def _count(
    forward: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    known: list[Tensor],
) -> Part:
    live = LiveBytes("meta")
    with live.counting():
        for _ in range(2):  # the first time makes gradients
            live.note(known)
            live.restart()
            before = live.num_bytes
            inputs = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            output = forward(inputs)
            kept, forward_peak = live.num_bytes - before - output.nbytes, live.peak - before
            gradient = torch.empty_like(output)
            live.restart()
            start = live.num_bytes
            output.backward(gradient)
            backward_peak = live.peak - start
            counted = Part(kept, output.nbytes, max(0, forward_peak - kept), max(0, backward_peak))
            del inputs, output, gradient
    return counted


class State(NamedTuple):
    """Bytes of a parameter, of its gradient, and of what the optimizer keeps of it."""

    weight: int
    gradient: int
    optimizer: int


@dataclass(frozen=True)
class Task:
    """A model, and one step of so many sequences of its length."""

    model: Llama
    sequences: int
    dtype: torch.dtype
    state: State

    def block(self, samples: int = 1) -> Part:
        """What a block takes of one micro-batch."""
        return count_block(self.model, samples, self.dtype)

    def outside(self, samples: int = 1) -> Part:
        """What the last norm, head and loss take."""
        return count_outside(self.model, samples, self.dtype)

    @property
    def planned(self) -> StepModel:
        """Plans the model in the format of `dtype`."""
        return step_model(self.model, "bf16-true" if self.dtype is torch.bfloat16 else "32-true")

    def states(self, parameters: float) -> float:
        """What parameters take with gradients and optimizer."""
        return parameters * sum(self.state)


SEVEN_B = State(weight=2, gradient=4, optimizer=12)
"""bf16 parameters, fp32 gradients and master weights, Adam"""


@dataclass(frozen=True)
class Held:
    """Bytes of the rank that holds the most."""

    system: str
    layout: str
    state: float
    """parameters, gradients, optimizer"""
    batch: float
    """all else"""

    @property
    def total(self) -> float:
        """All of it."""
        return self.state + self.batch


def peers(task: Task, num_ranks: int) -> list[Held]:
    """The other systems."""
    model, whole = task.model, float(task.model.parameters)
    own = task.sequences // num_ranks
    block, outside = task.block(samples=own), task.outside(own)
    kept = model.num_blocks * block.kept + outside.kept + max(outside.forward, outside.backward)
    one, last = task.block(), task.outside()
    weight, gradient, optimizer = task.state
    in_tensor_parallel = (model.num_blocks * one.kept + last.kept + max(last.forward, last.backward)) / num_ranks
    stage = model.num_blocks / num_ranks
    in_pipeline = num_ranks * stage * one.kept + max(one.forward, one.backward)
    first = stage * model.block_parameters + model.outside_parameters / 2
    fsdp = (weight + optimizer) * whole / num_ranks  # gradients are made later than the peak, at the loss
    return [
        Held("DDP", f"batches of {own}", task.states(whole), kept),
        Held("FSDP2", f"batches of {own}", fsdp, kept + weight * model.outside_parameters),
        Held("Megatron-LM", f"TP={num_ranks}, sequence parallel", task.states(whole) / num_ranks, in_tensor_parallel),
        Held("Megatron-LM", f"PP={num_ranks}, 1F1B", task.states(first), in_pipeline),
    ]


def ours(task: Task, layout: Candidate) -> Held:
    """A layout of ours, by its plan."""
    memory = task.planned.simulated(layout).memory
    state = memory.weights + memory.gradients + memory.optimizer
    return Held("ours", layout.whole_name, state, memory.total - state)


def best(task: Task, num_ranks: int) -> list[Held]:
    """Our layouts that hold the least: for each number of pipeline ranks, and with shared tokens if that is less.

    None recomputes blocks, and data ranks share the optimizer.
    """
    found: dict[tuple[int, str], Held] = {}
    choices = Choices(("microbatch",), (False,), cube_outside=ALL.cube_outside)
    for one in candidates(task.planned.facts, num_ranks, task.sequences, Counter(), choices=choices):
        if one.recompute or one.accumulate > 1 or one.num_waves > 2 or one.shard_optimizer != (one.data > 1):
            continue
        kind, held = (one.pipe, one.cube_outside), ours(task, one)
        if kind not in found or held.total < found[kind].total:
            found[kind] = held
    return [
        held
        for (pipe, outside), held in found.items()
        if outside == "share" or (pipe, "share") not in found or held.total < found[pipe, "share"].total
    ]
