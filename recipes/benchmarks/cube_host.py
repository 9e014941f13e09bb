"""Measures the host time of one block: as it is, with torch's tensor parallelism (DTensor), and in a cube.

python -m recipes.benchmarks.cube_host --table cube_host.md
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from recipes.benchmarks.harness import Columns, Findings, Summary, describe, new_parser, number, page, run, table

NUM_RANKS = 8
BATCH, LENGTH, FEATURES, HEADS, INNER = 2, 16, 64, 8, 128
MESHES = ((2, 2, 2), (1, 2, 4), (2, 4, 1), (1, 8, 1))
COMPILED = ("plain", "cube (2, 2, 2)")


@dataclass(frozen=True)
class HostTime:
    """Microseconds of CPU time per block, and how many calls and collectives its forward and its backward make."""

    forward: Summary
    backward: Summary
    step: Summary
    calls: tuple[int, int] | None
    """None of a compiled block, whose calls can't be counted"""
    collectives: tuple[int, int] | None


@dataclass(frozen=True)
class Candidate:
    """One way to run the block. `x` is the rank's part of its input; `begin` is called before each pass."""

    block: nn.Module
    x: Tensor
    rotary: tuple[Tensor, Tensor]
    begin: Callable[[bool], None] = lambda is_backward: None

    def forward(self) -> Tensor:
        """Run the forward."""
        self.begin(False)
        y: Tensor = self.block(self.x, position_embeddings=self.rotary)
        return y

    def backward(self, y: Tensor) -> None:
        """Run the backward."""
        self.begin(True)
        y.sum().backward()

    def times(self, calls: int) -> tuple[float, float]:
        """Microseconds per forward and backward."""
        total = [0.0, 0.0]
        for _ in range(calls):
            self.zero_grad()
            start = time.process_time()
            y = self.forward()
            middle = time.process_time()
            self.backward(y)
            total[0], total[1] = total[0] + middle - start, total[1] + time.process_time() - middle
        return total[0] / calls * 1e6, total[1] / calls * 1e6

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.x.grad = None
        self.block.zero_grad()


class _Calls(TorchDispatchMode):
    """Counts the calls that reach the dispatcher, of plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, dist.tensor.DTensor) for one in types):
            return NotImplemented  # count what it calls instead
        is_communication = func.namespace in ("c10d", "_c10d_functional")
        self.collectives += is_communication and "wait" not in func.name()
        self.calls += not is_communication
        return func(*args, **(kwargs or {}))


def measure(rounds: int, calls: int, kv_heads: int, backend: str | None) -> dict[str, HostTime]:
    """Run all candidates, two of them also compiled by `backend`. Nothing else may use process groups meanwhile."""
    with _fake_process_group():
        candidates = dict(_candidates(kv_heads))
        counts: dict[str, tuple[Any, Any]] = {name: _count(candidate) for name, candidate in candidates.items()}
        if backend is not None:
            compiled = {name: candidate for name, candidate in _candidates(kv_heads) if name in COMPILED}
            candidates |= {f"{name}, compiled": _compiled(candidate, backend) for name, candidate in compiled.items()}
            counts |= {f"{name}, compiled": (None, None) for name in compiled}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
        for _ in range(rounds):
            for name, candidate in candidates.items():
                times[name].append(candidate.times(calls))
        return {name: _host_time(times[name], *counts[name]) for name in candidates}


def _compiled(candidate: Candidate, backend: str) -> Candidate:
    candidate.block.compile(backend=backend, fullgraph=True)
    candidate.backward(candidate.forward())
    return candidate


def _host_time(times: list[tuple[float, float]], calls: Any, collectives: Any) -> HostTime:
    forward, backward = zip(*times, strict=True)
    return HostTime(Summary.of(forward), Summary.of(backward), Summary.of(list(map(sum, times))), calls, collectives)


@contextmanager
def _fake_process_group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _candidates(kv_heads: int) -> Iterator[tuple[str, Candidate]]:
    rotary = _rotary(kv_heads)
    yield "plain", Candidate(_block(kv_heads), torch.randn(BATCH, LENGTH, FEATURES, requires_grad=True), rotary)
    x = torch.randn(BATCH, LENGTH // NUM_RANKS, FEATURES, requires_grad=True)
    yield "DTensor", Candidate(_with_dtensors(_block(kv_heads)), x, rotary)
    for sizes in MESHES:
        yield f"cube {sizes}", _in_cube(_block(kv_heads), sizes, rotary)


def _config(kv_heads: int) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=FEATURES, num_attention_heads=HEADS, num_key_value_heads=kv_heads, intermediate_size=INNER
    )
    config._attn_implementation = "sdpa"
    return config


def _block(kv_heads: int) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    block: nn.Module = LlamaDecoderLayer(_config(kv_heads), 0)
    return block


def _rotary(kv_heads: int) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cos, sin = LlamaRotaryEmbedding(_config(kv_heads))(torch.zeros(1, LENGTH, FEATURES), torch.arange(LENGTH)[None])
    return cos.detach(), sin.detach()


def _with_dtensors(block: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    sequence, whole = Shard(1), Replicate()
    styles = {
        "input_layernorm": tp.SequenceParallel(),
        "self_attn": tp.PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": sequence}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "self_attn.o_proj": tp.RowwiseParallel(output_layouts=sequence),
        "post_attention_layernorm": tp.SequenceParallel(),
        "mlp": tp.PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        "mlp.down_proj": tp.RowwiseParallel(output_layouts=sequence),
    }
    up = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    styles |= {name: tp.ColwiseParallel() for name in up}
    return tp.parallelize_module(block, init_device_mesh("cpu", (NUM_RANKS,)), styles)


def _in_cube(block: nn.Module, sizes: tuple[int, int, int], rotary: tuple[Tensor, Tensor]) -> Candidate:
    assert prod(sizes) == NUM_RANKS
    context = StageContext(Mesh.create(sizes))
    plan_parallelize([block], "layers", sizes).install([block], context)

    def begin(is_backward: bool) -> None:
        (context.before_backward if is_backward else context.before_forward)(LENGTH)

    x, y, z = sizes
    return Candidate(block, torch.randn(BATCH // x, LENGTH // y, FEATURES // z, requires_grad=True), rotary, begin)


def _count(candidate: Candidate) -> tuple[tuple[int, int], tuple[int, int]]:
    for _ in range(2):  # the second time weights are gathered ahead, as in a run
        candidate.backward(candidate.forward())
    candidate.zero_grad()
    with _Calls() as forward:
        y = candidate.forward()
    with _Calls() as backward:
        candidate.backward(y)
    return (forward.calls, backward.calls), (forward.collectives, backward.collectives)


READING = """\
A Llama block of Hugging Face with tensors so small that arithmetic costs nothing: the CPU time is what the host spends
on Python, on autograd and on torch's calls. torch's fake process group stands for 8 ranks; its collectives return at
once, and the layers take the branch that they take on NCCL. All candidates run in turn in one process, and each figure
is a median over the rounds. Calls are those that reach torch's dispatcher; "to DTensor" compares with
`parallelize_module` (column- and row-parallel layers, norms over the sequence) on 8 ranks.

    python -m recipes.benchmarks.cube_host --compile inductor --table docs/benchmarks/cube_host.md"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    parser = new_parser("cube_host", __doc__)
    number(parser, "--rounds", 21, "the median is shown")
    number(parser, "--calls", 20, "steps per round")
    number(parser, "--heads", 8, "of k and v; q has 8")
    parser.add_argument("--compile", metavar="BACKEND", help='measure compiled blocks, too: "inductor" (default: none)')
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    torch.set_num_threads(1)
    found = measure(options.rounds, options.calls, options.heads, options.compile)
    plain, other = (found[name].step.median for name in ("plain", "DTensor"))
    columns: Columns = (
        ("block", lambda one: one[0]),
        ("forward us", lambda one: f"{one[1].forward.median:.0f}"),
        ("backward us", lambda one: f"{one[1].backward.median:.0f}"),
        ("to plain", lambda one: f"{one[1].step.median / plain:.2f}"),
        ("to DTensor", lambda one: f"{one[1].step.median / other:.2f}"),
        ("calls forward", lambda one: str((one[1].calls or "--")[0])),
        ("backward", lambda one: str((one[1].calls or "--")[1])),
        ("collectives forward", lambda one: str((one[1].collectives or "--")[0])),
        ("backward", lambda one: str((one[1].collectives or "--")[1])),
    )
    machine = describe("CPU, 1 thread, fake process group of 8 ranks")
    data = {"machine": machine, "blocks": found}
    return Findings(page("# Host time of a block", machine, table(columns, found.items()), READING), data)


if __name__ == "__main__":
    sys.exit(main())
