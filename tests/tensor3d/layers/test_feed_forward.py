"""3-D feed-forward networks equal those of torch's layers in both styles, in whichever order their layers are made."""

from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_hanayo.tensor_parallel.layers.linear import Linear3D, parallelize_linear
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import BATCH, SEQUENCE, ParallelStyle
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.tensor3d.comparing import gradient_errors, too_large

STYLES: dict[str, tuple[ParallelStyle, tuple[str, ...]]] = {
    "sequence": (SEQUENCE, ("x", "y", "z")),
    "batch": (BATCH, ("xy", "", "z")),
}


class Network(nn.Module):
    """Of torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def made(kind: str, context: StageContext, style: ParallelStyle) -> nn.Module:
    network = Network()
    if kind == "backwards":  # its layers are parallelized in another order
        parallelize_linear(network.down, context, style.row_parallel())
        Linear3D(8, 8, context=context, style=style)  # one that nobody uses
    parallelize_linear(network.up, context, style)
    if kind == "plain":
        parallelize_linear(network.down, context, style.row_parallel())
    return network


def compared(
    ranks: Mesh, kind: str, style: ParallelStyle, axes: tuple[str, ...], context: StageContext
) -> dict[str, float]:
    """Each is used twice, so that its weights get two gradients.

    Where the sequence's parts are padded, the padding is cut off the output.
    """
    reference, module = Network(), made(kind, context, style)
    length = 6 if context.sequence_parts is None else min(context.sequence_parts.sizes)
    x = torch.randn(8, length, 8, dtype=torch.float64)
    gradient = torch.randn_like(x)
    padded = pad(x, (0, 0, 0, 6 - length))
    own = part(padded, ranks, *axes).requires_grad_()
    x.requires_grad_()
    y = reference(reference(x))
    y.backward(gradient)
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
            for kind, style, keep in product(("plain", "backwards"), STYLES, ("gathered", "shards")):
                lengths = (None, 5) if style == "sequence" else (None,)
                for length in lengths:
                    context = StageContext(ranks, keep, sequence_length=length)
                    case = compared(ranks, kind, *STYLES[style], context)
                    errors |= {f"{sizes} {kind} {style} {keep} {length} {w}": e / 1e-10 for w, e in case.items()}
    return errors


MESHES: list[list[Sizes]] = [[(2, 2, 2)], [(1, 2, 2), (2, 1, 2), (4, 1, 1)]]


@pytest.mark.parametrize("meshes", covered(MESHES, by=MESHES[1:]), ids=["8 ranks", "4 ranks"])
def test_equals_torchs_layers(pool: Pool, meshes: list[Sizes]) -> None:
    assert too_large(pool.run(prod(meshes[0]), feed_forwards, meshes)) == []
