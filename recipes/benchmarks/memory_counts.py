"""Counts what a Llama's blocks, and its code outside them, take of one micro-batch: on the meta device, at any size."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from lightning_hanayo import chunked_cross_entropy
from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.pipeline_parallel.profiling.memory import LiveBytes
from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from recipes.h100.counting_group import Tally, counting_mesh
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
def block(model: Llama, mesh: MeshSizes, samples: int, dtype: torch.dtype) -> Part:
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
def outside(model: Llama, samples: int, dtype: torch.dtype) -> Part:
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
def shared_outside(model: Llama, samples: int, num_ranks: int, dtype: torch.dtype) -> Part:
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
