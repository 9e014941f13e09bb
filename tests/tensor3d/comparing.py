"""Compares the gradients of 3-D modules, once their partial sums are complete, with those of reference modules."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.sharding import Shard, shards_of
from tests.harness.mesh import error

ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""of the largest expected value"""


def reduced(gradient: Tensor | None, shard: Shard, mesh: Mesh) -> Tensor | None:
    """The gradient of one rank's shard, complete if it was a partial sum."""
    if gradient is None or not shard.partial:
        return gradient
    return mesh.axis(shard.partial).all_reduce(gradient.clone()).wait()


def gradient_errors(sharded: nn.Module, reference: nn.Module, mesh: Mesh) -> dict[str, float]:
    """By parameter. Each parameter must also hold its shard of the reference parameter."""
    errors = {}
    for path, module in sharded.named_modules():
        for name, shard in shards_of(module).items():
            twin = reference.get_submodule(path)._parameters[name]
            own = module._parameters[name]
            assert own is not None and twin is not None and twin.grad is not None
            assert torch.equal(own.detach(), shard.of(twin.detach(), mesh)), name
            errors[f"{path}.{name}"] = error(reduced(own.grad, shard, mesh), shard.of(twin.grad, mesh))
    return errors


def too_large(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The errors beyond what is allowed, of all ranks that have some. `pool.run` returns what each rank measured."""
    wrong = [{what: value for what, value in case.items() if not value <= 1.0} for case in cases]
    return [case for case in wrong if case]
