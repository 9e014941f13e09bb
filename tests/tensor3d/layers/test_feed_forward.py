"""3-D feed-forward networks equal those of torch's layers in both styles, in whichever order their layers are made."""

from copy import deepcopy
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from lightning_hanayo.tensor_parallel.layers.linear import FeedForward3D, Linear3D, SwiGLU3D, parallelize_linear
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import BATCH, SEQUENCE, ParallelStyle
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.tensor3d.comparing import gradient_errors, too_large

STYLES: dict[str, tuple[ParallelStyle, tuple[str, ...]]] = {
    "sequence": (SEQUENCE, ("x", "y", "z")),
    "batch": (BATCH, ("xy", "", "z")),
}


class Reference(nn.Module):
    """Both networks of torch's layers, with the same names."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        if gated:
            self.gate = nn.Linear(8, 16, dtype=torch.float64)
        self.up = nn.Linear(8, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 8, dtype=torch.float64)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(silu(self.gate(x)) * self.up(x) if self.gated else torch.relu(self.up(x)))
        return y


class Backwards(nn.Module):
    """The plain network, whose layers are made and parallelized in another order."""

    def __init__(self, context: StageContext, style: ParallelStyle) -> None:
        super().__init__()
        reference = Reference(False)
        self.down = reference.down
        parallelize_linear(self.down, context, style.row_parallel())
        Linear3D(8, 8, context=context, style=style)  # one that nobody uses
        self.up = reference.up
        parallelize_linear(self.up, context, style)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def made(kind: str, context: StageContext, style: ParallelStyle) -> nn.Module:
    torch.manual_seed(0)
    if kind == "backwards":
        return Backwards(context, style)
    if kind == "swiglu":
        return SwiGLU3D(8, 16, bias=True, context=context, style=style, dtype=torch.float64)
    return FeedForward3D(8, 16, torch.relu, context=context, style=style, dtype=torch.float64)


def compared(
    ranks: Mesh, kind: str, style: ParallelStyle, axes: tuple[str, ...], context: StageContext
) -> dict[str, float]:
    """Each is used twice, so that its weights get two gradients.

    Where the sequence's parts are padded, the padding is cut off the output.
    """
    torch.manual_seed(0)
    reference = Reference(kind == "swiglu")
    module = made(kind, context, style)
    length = 6 if context.sequence_parts is None else min(context.sequence_parts.sizes)
    x = torch.randn(8, length, 8, dtype=torch.float64)
    gradient = torch.randn_like(x)
    padded = pad(x, (0, 0, 0, 6 - length))
    own = part(padded, ranks, *axes).requires_grad_()
    x.requires_grad_()
    y = reference(reference(x))
    y.backward(gradient)
    CountingAxis.received.clear()
    own_y = module(module(own))
    own_y.backward(part(pad(gradient, (0, 0, 0, 6 - length)), ranks, *axes))
    assert x.grad is not None
    start = ranks.index("y") * own.shape[1] if length < 6 else 0
    real = slice(0, max(0, min(own.shape[1], length - start)))
    expected = part(pad(y.detach(), (0, 0, 0, 6 - length)), ranks, *axes)
    errors = {"dx": error(own.grad, part(pad(x.grad, (0, 0, 0, 6 - length)), ranks, *axes))}
    if real.stop:
        errors["y"] = error(own_y[:, real], expected[:, real])
    return errors | gradient_errors(module, reference, ranks)


def feed_forwards(meshes: list[Sizes]) -> dict[str, float]:
    errors = {}
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            for kind, style, keep in product(("plain", "swiglu", "backwards"), STYLES, ("gathered", "shards")):
                lengths = (None, 5) if style == "sequence" else (None,)
                for length in lengths:
                    context = StageContext(ranks, keep, sequence_length=length)
                    case = compared(ranks, kind, *STYLES[style], context)
                    errors |= {f"{sizes} {kind} {style} {keep} {length} {w}": e / 1e-10 for w, e in case.items()}
            gathers_once(ranks)
    return errors


def gathers_once(ranks: Mesh) -> None:
    """SwiGLU gathers x once for both layers, under autocast in bf16."""
    module = SwiGLU3D(8, 16, context=StageContext(ranks))
    x = torch.randn(8 // ranks.size("x"), 6 // ranks.size("y"), 8 // ranks.size("z"))
    CountingAxis.received.clear()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype is torch.bfloat16
    inputs = x.numel() * (ranks.size("y") - 1)
    inner = 8 // ranks.size("x") * 6 * 16 // ranks.size("yz") * (ranks.size("z") - 1)
    weights = 3 * 8 * 16 // ranks.num_ranks * (ranks.size("x") - 1)
    assert CountingAxis.received["gather"] == 2 * (inputs + inner + weights)


def test_dropout_is_applied_in_training_only() -> None:
    module = FeedForward3D(8, 16, dropout=0.5, context=StageContext(Mesh.single()))
    x = torch.randn(4, 8)
    assert not torch.equal(module(x), module(x))
    assert torch.equal(module.eval()(x), module(x))


MESHES: list[list[Sizes]] = [[(2, 2, 2)], [(1, 2, 2)], [(2, 1, 2), (4, 1, 1)]]


@pytest.mark.parametrize("meshes", covered(MESHES, by=MESHES[1:2]), ids=["8 ranks", "4 ranks", "4 ranks, others"])
def test_equals_torchs_layers(pool: Pool, meshes: list[Sizes]) -> None:
    assert too_large(pool.run(prod(meshes[0]), feed_forwards, meshes)) == []


def test_the_layers_of_a_deep_copy_share_the_copys_input() -> None:
    layer = SwiGLU3D(4, 8, context=StageContext(Mesh.single(), "shards"))
    twin = deepcopy(layer)
    assert twin._shared_input is not layer._shared_input
    assert twin.gate.sharding.shared_input is twin.up.sharding.shared_input is twin._shared_input
    own, shared = twin.up.sharding.product, twin._shared_input._product
    assert own is not None and own.weight.parameters == [twin.up._parameters["weight"]]
    assert shared is not None and [part.module for part in shared.weight.parts] == [twin.gate, twin.up]
