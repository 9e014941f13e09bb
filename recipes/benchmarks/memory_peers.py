"""Compares what a rank holds with DDP, FSDP2, Megatron-LM's ways and ours, on paper, and where it can be measured.

One step of `sequences` sequences on N ranks, of a Llama with L blocks of P_b parameters, and P_o in embedding and head.

    DDP        state (L P_b + P_o)                     + sequences / N at once: L blocks, head and loss
    FSDP2      state (L P_b + P_o) / N + whole P_o     + the same
    TP = N     state (L P_b + P_o) / N                 + one sequence at once, 1/N of everything (sequence parallelism)
    PP = N     state (L P_b / N + P_o / 2)             + N sequences at once in L / N blocks (rank 0, 1F1B)

The last two: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
section 4.2, with the bytes of a block counted on the meta device, at any size, instead of 34 s b h.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hanayo import chunked_cross_entropy
from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partition.cut import Load, cut
from lightning_hanayo.pipeline_parallel.profiling.memory import LiveBytes
from lightning_hanayo.planner.layout import choose
from lightning_hanayo.schedule import CostModel, MemoryModel, simulate
from lightning_hanayo.strategy.memory import send_buffers
from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from recipes.h100.counts import Tally, counting_mesh
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
def count_block(model: Llama, mesh: MeshSizes, samples: int, dtype: torch.dtype) -> Part:
    """A block in a cube; without one the mesh is (1, 1, 1). `samples` are sequences of the model's length."""
    one, rotary = model.block().to(dtype), tuple(part.to(dtype) for part in model.rotary())
    context = StageContext(counting_mesh(mesh, Tally()))
    if prod(mesh) > 1:
        plan_parallelize([one], "layers", mesh).install([one], context)
    x, y, z = mesh
    shape = samples // x, model.length // y, model.hidden // z

    def forward(inputs: Tensor) -> Tensor:
        context.before_forward(model.length)
        output: Tensor = one(inputs, position_embeddings=rotary)
        return output

    return _count(forward, shape, dtype, [*one.parameters(), *rotary], lambda: context.before_backward(model.length))


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
        return ForCausalLMLoss(head(norm(inputs)), labels, model.vocabulary)

    shape = samples, model.length, model.hidden
    return _count(forward, shape, dtype, [*norm.parameters(), *head.parameters(), labels])


@cache
def count_shared_outside(model: Llama, samples: int, num_ranks: int, dtype: torch.dtype) -> Part:
    """The same where so many ranks share the tokens: each has the norm of all, and head and loss of its own."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with torch.device("meta"):
        norm, weight = LlamaRMSNorm(model.hidden).to(dtype), torch.empty(model.vocabulary, model.hidden, dtype=dtype)
        labels = torch.empty((samples, model.length // num_ranks), dtype=torch.long)
    head = torch.nn.Parameter(weight)

    def forward(inputs: Tensor) -> Tensor:
        own = norm(inputs)[:, : model.length // num_ranks].contiguous()
        return chunked_cross_entropy(own, head, labels)

    shape = samples, model.length, model.hidden
    return _count(forward, shape, dtype, [*norm.parameters(), head, labels])


def _count(
    forward: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    known: list[Tensor],
    before_backward: Callable[[], None] = lambda: None,
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
            before_backward()
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
    keeps_buffers: bool = False
    """whether send buffers are kept for the next messages, as on CPUs"""

    def block(self, mesh: MeshSizes = (1, 1, 1), samples: int = 1) -> Part:
        """What a block takes of one micro-batch."""
        return count_block(self.model, mesh, samples, self.dtype)

    def outside(self, samples: int = 1) -> Part:
        """What the last norm, head and loss take."""
        return count_outside(self.model, samples, self.dtype)

    def shared_outside(self, samples: int, num_ranks: int) -> Part:
        """The same where ranks share the tokens of the loss."""
        return count_shared_outside(self.model, samples, num_ranks, self.dtype)

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


def ours(task: Task, options: Mapping[str, Any], samples: int) -> Held:
    """A layout of ours, with so many sequences per micro-batch, by `MemoryModel`.

    Raises:
        HanayoError: it can't be run.
    """
    model, (weight, gradient, optimizer) = task.model, task.state
    num_ranks, data = options.get("pipeline_parallel_size", 1), options.get("data_parallel_size", 1)
    mesh: MeshSizes = options.get("cube", (1, 1, 1))
    size, num_microbatches = prod(mesh), task.sequences // data // samples
    layout = choose(
        num_ranks=num_ranks,
        num_blocks=model.num_blocks,
        num_waves=options.get("num_waves", 1),
        num_microbatches=num_microbatches,
        schedule=options.get("schedule", "hanayo"),
        separate_loss_stage=size > 1,
    )
    table = layout.table(num_microbatches)
    head = model.outside_parameters / 2  # the embedding computes nothing
    loads = [Load([model.block_parameters] * model.num_blocks, outside) for outside in (head, 2 * head)]
    count = [len(one) for one in cut(loads, table.stage_ranks[: layout.num_stages])] + [0] * table.loss_stage
    shares_tokens = options.get("cube_outside") == "tokens"
    outside = task.shared_outside(samples, size) if shares_tokens else task.outside(-(-samples // size))
    block = task.block(mesh, samples)
    is_last = [stage == len(count) - 1 for stage in range(len(count))]
    is_first = [stage == 0 for stage in range(len(count))]
    parameters = [number * model.block_parameters / size for number in count]
    whole = float(model.outside_parameters)
    buffers = send_buffers(table, [block.output] * len(count), keeps_spare=task.keeps_buffers)
    divided = data if options.get("shard_optimizer") else 1

    def on_first(value: float) -> list[float]:
        return [value * first for first in is_first]

    def largest(name: str) -> tuple[float, ...]:
        of_block, of_outside = getattr(block, name), getattr(outside, name)
        return tuple(float(of_outside if last else of_block) for last in is_last)

    memory = MemoryModel(
        activation=tuple(float(number * block.kept) for number in count),
        weights=_sum([weight * one for one in parameters], on_first(weight * whole / size)),
        new_gradients=_sum([gradient * one for one in parameters], on_first(0 if size > 1 else gradient * whole)),
        optimizer=_sum([optimizer * one / divided for one in parameters], on_first(optimizer * whole / size / divided)),
        gathered=tuple(on_first(whole * (weight + gradient) if size > 1 else 0.0)),
        suspended=tuple(float(outside.kept * last) for last in is_last),
        message=float(block.output),
        send_buffers=_of_ranks(table.stage_ranks, buffers),
        forward_workspace=largest("forward"),
        backward_workspace=largest("backward"),
    )
    times = (1.0,) * len(count)  # a loss stage takes time, too
    peak = max(memory.peaks(simulate(table, CostModel(times, times, times))), key=lambda rank: rank.total)
    state = peak.weights + peak.gradients + peak.optimizer
    return Held("ours", f"{describe_layout(options)}, micro-batches of {samples}", state, peak.total - state)


def best(task: Task, num_ranks: int) -> list[Held]:
    """Our layouts that hold the least: for each number of pipeline ranks, and with shared tokens if that is less."""
    found: dict[tuple[int, bool], Held] = {}
    for options, samples in _candidates(num_ranks, task.sequences):
        try:
            held = ours(task, options, samples)
        except HanayoError:  # fewer blocks than stages
            continue
        kind = options["pipeline_parallel_size"], "cube_outside" in options
        if kind not in found or held.total < found[kind].total:
            found[kind] = held
    return [
        held
        for (pipe, shares_tokens), held in found.items()
        if not shares_tokens or (pipe, False) not in found or held.total < found[pipe, False].total
    ]


def _candidates(num_ranks: int, sequences: int) -> Iterator[tuple[dict[str, Any], int]]:
    sizes = [1, 2, 4, 8]
    for pipe in sizes:
        for mesh in ((x, y, z) for x in sizes for y in sizes for z in sizes):
            data = num_ranks // (pipe * prod(mesh))
            if pipe * prod(mesh) * data != num_ranks:
                continue
            options: dict[str, Any] = {"pipeline_parallel_size": pipe}
            options |= {"cube": mesh} if prod(mesh) > 1 else {}
            options |= {"data_parallel_size": data, "shard_optimizer": True} if data > 1 else {}
            for samples in (mesh[0], prod(mesh)):
                if sequences % (data * samples) == 0:
                    outside: list[dict[str, Any]] = [{}, *([{"cube_outside": "tokens"}] if prod(mesh) > 1 else [])]
                    yield from (
                        ({**options, "num_waves": waves, **one}, samples)
                        for waves in ((1, 2) if pipe > 1 else (1,))
                        for one in outside
                    )


def _sum(one: list[float], other: list[float]) -> tuple[float, ...]:
    return tuple(map(sum, zip(one, other, strict=True)))


def _of_ranks(stage_ranks: tuple[int, ...], values: list[int]) -> tuple[float, ...]:
    """What each rank holds, counted with its first stage."""
    return tuple(float(values[rank] if rank not in stage_ranks[:i] else 0) for i, rank in enumerate(stage_ranks))


_SHORT = {"pipeline_parallel_size": "P", "num_waves": "W", "num_microbatches": "B", "data_parallel_size": "D"}


def describe_layout(layout: Mapping[str, Any]) -> str:
    """The options of a layout, shortly."""
    return ", ".join(
        value if name == "schedule" else f"{_SHORT.get(name, name)}={str(value).replace(' ', '')}"
        for name, value in layout.items()
    )
