"""What spread modules are compared by: gradients, summed as the owner of a step does it, with those of a dense twin."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.sharding import Shard
from tests.harness.mesh import error

ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""of the largest expected value"""


def reduced(gradient: Tensor | None, shard: Shard, grid: Mesh) -> Tensor | None:
    """The gradient of one rank's part, no longer a partial sum."""
    if gradient is None or not shard.partial:
        return gradient
    return grid.axis(shard.partial).all_reduce(gradient.clone()).wait()


def gradient_errors(spread: nn.Module, dense: nn.Module, grid: Mesh) -> dict[str, float]:
    """By parameter; each must also hold its dense twin's part."""
    errors = {}
    for path, module in spread.named_modules():
        shards: dict[str, Shard] = getattr(module, "shards", {})
        for name, shard in shards.items():
            twin = dense.get_submodule(path)._parameters[name]
            own = module._parameters[name]
            assert own is not None and twin is not None and twin.grad is not None
            assert torch.equal(own.detach(), shard.of(twin.detach(), grid)), name
            errors[f"{path}.{name}"] = error(reduced(own.grad, shard, grid), shard.of(twin.grad, grid))
    return errors


def too_large(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of all ranks, what is beyond what is allowed; `pool.run` gives a list of them."""
    wrong = [{what: value for what, value in case.items() if not value <= 1.0} for case in cases]
    return [case for case in wrong if case]
