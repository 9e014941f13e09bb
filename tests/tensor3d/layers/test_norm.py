"""3-D norms are stable, equal torch's, send nothing where z is 1, and load whole weights."""

import pickle
from math import prod

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor_parallel.layers.norm import (
    LayerNorm3D,
    RMSNorm3D,
    parallelize_norm,
    parallelize_rms_norm,
    replicate_norm,
)
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.sharding import shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.tensor3d.comparing import ALLOWED, gradient_errors, too_large


class RoundedRMSNorm(nn.Module):
    """Computes what Hugging Face's `LlamaRMSNorm` does, whose import would take each worker seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(dtype)


NORMS = {
    "layer": lambda dtype: nn.LayerNorm(12, dtype=dtype),
    "layer, no bias": lambda dtype: nn.LayerNorm(12, eps=1e-3, bias=False, dtype=dtype),
    "layer, no weight": lambda dtype: nn.LayerNorm(12, elementwise_affine=False),
    "rms": lambda dtype: nn.RMSNorm(12, dtype=dtype),
    "rms, no weight": lambda dtype: nn.RMSNorm(12, eps=1e-3, elementwise_affine=False),
    "llama": lambda dtype: RoundedRMSNorm().to(dtype),
}


def made(kind: str, dtype: torch.dtype) -> nn.Module:
    """A new norm, with the same random weights each time."""
    norm: nn.Module = NORMS[kind](dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def compared(ranks: Mesh, kind: str, x: Tensor, autocast: bool = False) -> dict[str, float]:
    """Errors of output and gradients, in units of what is allowed."""
    norm, reference = made(kind, x.dtype), made(kind, x.dtype)
    parallelize_rms_norm(norm, StageContext(ranks)) if "llama" in kind else parallelize_norm(norm, StageContext(ranks))
    own = part(x, ranks, "x", "y", "z").requires_grad_()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, own_y = reference(x), norm(own)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    own_y.backward(part(gradient, ranks, "x", "y", "z"))
    assert x.grad is not None and own_y.dtype is y.dtype
    errors = {"y": error(own_y, part(y.detach(), ranks, "x", "y", "z"))}
    errors["dx"] = error(own.grad, part(x.grad, ranks, "x", "y", "z"))
    errors |= gradient_errors(norm, reference, ranks)
    allowed = ALLOWED[torch.float32 if kind == "llama" and x.dtype is torch.float64 else x.dtype]
    return {f"{ranks.sizes} {kind} {x.dtype}: {what}": value / allowed for what, value in errors.items()}


def all_norms(meshes: list[Sizes]) -> dict[str, float]:
    errors = {}
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            for kind in NORMS:
                for dtype in (torch.float64, torch.float32, torch.bfloat16):
                    torch.manual_seed(0)
                    errors |= compared(ranks, kind, torch.randn(4, 4, 12, dtype=dtype))
                errors |= compared(ranks, kind, torch.randn(4, 4, 12), autocast=True)
    return errors


@pytest.mark.parametrize("meshes", [[(2, 2, 2)], [(1, 1, 4), (1, 2, 2), (4, 1, 1)]], ids=["8 ranks", "4 ranks"])
def test_equals_torchs_norms(pool: Pool, meshes: list[Sizes]) -> None:
    assert too_large(pool.run(prod(meshes[0]), all_norms, meshes)) == []


def alone() -> None:
    """Two ranks along y, then along z."""
    with process_group():
        ranks = make_mesh((1, 2, 1))
        CountingAxis.received.clear()
        for kind in NORMS:
            norm, reference, x = made(kind, torch.float32), made(kind, torch.float32), torch.randn(3, 12)
            parallelize_rms_norm(norm, StageContext(ranks)) if "llama" in kind else parallelize_norm(
                norm, StageContext(ranks)
            )
            assert torch.equal(norm(x), reference(x)) and type(norm) is not type(reference)
        assert not CountingAxis.received
        ranks = make_mesh((1, 1, 2))
        x = 1e3 + 0.1 * torch.randn(64, 12, dtype=torch.float64)
        y = LayerNorm3D(12, context=StageContext(ranks))(part(x.float(), ranks, "", "z"))
        exact = nn.functional.layer_norm(x.float().double(), (12,))
        assert error(y.double(), part(exact, ranks, "", "z")) < 2e-3  # fp32 of 1e3 resolves 6e-5 of 0.1
        x = torch.ones(64, 6, requires_grad=True)
        CountingAxis.received.clear()
        RMSNorm3D(12, context=StageContext(ranks))(x).sum().backward()
        assert CountingAxis.received == {"reduce": (1 + 1) * 64 * 4}
        CountingAxis.received.clear()
        LayerNorm3D(12, context=StageContext(ranks))(x).sum().backward()
        assert CountingAxis.received == {"gather": 2 * 64 * 4, "reduce": 2 * 64 * 4}
        loads(ranks)
        refusals(ranks)


def loads(ranks: Mesh) -> None:
    """A whole weight into shards, and back."""
    norm, whole = LayerNorm3D(12, context=StageContext(ranks)), torch.arange(12.0)
    shard = shards_of(norm)["weight"]
    norm.load_state_dict({"weight": shard.of(whole, ranks), "bias": shard.of(-whole, ranks)})
    read = torch.zeros(12)
    for z in range(2):
        shard.put(read, shard.of(whole, ranks, (0, 0, z)), ranks, (0, 0, z))
    assert torch.equal(read, whole) and torch.equal(norm.bias, -part(whole, ranks, "z"))
    assert norm.normalized_shape == (12,)


def refusals(ranks: Mesh) -> None:
    with pytest.raises(HanayoError, match="13 features, which don't divide over z = 2"):
        LayerNorm3D(13, context=StageContext(ranks))
    with pytest.raises(UnsupportedError, match="over the last 2 dimensions"):
        parallelize_norm(nn.LayerNorm((4, 12)), StageContext(ranks))
    with pytest.raises(UnsupportedError, match="has no parameter `weight`"):
        parallelize_rms_norm(nn.Identity(), StageContext(ranks))


def test_sends_nothing_alone_is_stable_and_loads(pool: Pool) -> None:
    pool.run(2, alone)


def test_a_replicated_norm_keeps_its_class_and_can_be_pickled() -> None:
    norm = nn.LayerNorm(4)
    replicate_norm(norm, StageContext(Mesh.single()))
    assert type(pickle.loads(pickle.dumps(norm))) is nn.LayerNorm and set(shards_of(norm)) == {"weight", "bias"}
