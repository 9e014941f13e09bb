"""Bytes that are communicated and saved for the backward, and meshes on which 3-D equals FSDP or tensor parallelism.

forward     X along y, W along x: all-gathered       Y along z: reduce-scattered
backward    dY along z: all-gathered                 dX along y, dW along x: reduce-scattered

(P, 1, 1) is FSDP, (1, P, 1) tensor parallelism with sequence parallelism: torch's own must give the same.
"""

from itertools import groupby
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor_parallel.layers.linear import Linear3D
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import BATCH, SEQUENCE, Keep, ParallelStyle
from lightning_hanayo.tensor_parallel.sharding import shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import MESH_SIZES, CountingAxis, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool

ROWS, LENGTH, IN, OUT = 12, 12, 12, 24
STYLES: dict[str, tuple[ParallelStyle, tuple[str, ...]]] = {
    "sequence": (SEQUENCE, ("x", "y", "z")),
    "batch": (BATCH, ("xy", "", "z")),
}


def check_traffic(ranks: Mesh, style: ParallelStyle, axes: tuple[str, ...], keep: Keep, autocast: bool) -> None:
    """One layer, forward and backward, compared with the formulas."""
    x, y, z = ranks.sizes
    m, k, n, p = ROWS * LENGTH, IN, OUT, ranks.num_ranks
    width = 2 if autocast else 4
    layer = Linear3D(k, n, context=StageContext(ranks, keep), style=style)
    own = part(torch.randn(ROWS, LENGTH, IN), ranks, *axes).requires_grad_()
    kept: list[Tensor] = []

    def keeps(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    CountingAxis.received.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_tensors_hooks(keeps, lambda tensor: tensor):
        out = layer(own)
    inputs, weights, outputs = (y - 1) * m * k // p, (x - 1) * k * n // p, (z - 1) * m * n // p
    assert received() == {"gather": width * (inputs + weights), "scatter": width * outputs}
    whole = m * k // (x * z) + k * n // (y * z)
    assert sum(tensor.nbytes for tensor in kept) == width * (whole if keep == "gathered" else m * k // p)
    out.backward(torch.ones_like(out))
    again = 0 if keep == "gathered" else inputs + weights
    assert received() == {
        "gather": width * (inputs + weights + again + outputs),
        "scatter": width * (outputs + inputs + weights),
    }
    assert out.dtype is (torch.bfloat16 if autocast else torch.float32)
    assert all(parameter.grad is not None and parameter.grad.dtype is torch.float32 for parameter in layer.parameters())


def check_batch(ranks: Mesh, microbatches: int) -> None:
    """Weights are gathered, and the sums of their gradients reduce-scattered, once in a batch."""
    x, y, z = ranks.sizes
    parameters = {}
    for keeps in (False, True):
        context = StageContext(ranks, keep_weights=keeps)
        torch.manual_seed(0)
        layer = Linear3D(IN, OUT, context=context).double()
        own = part(torch.randn(ROWS, LENGTH, IN, dtype=torch.float64), ranks, "x", "y", "z").requires_grad_()
        CountingAxis.received.clear()
        context.begin_batch()
        for microbatch in range(microbatches):
            context.before_forward(LENGTH)
            out = layer((1 + microbatch) * own)
            if microbatch == microbatches - 1:
                context.expect_last_gradients()
            context.before_backward(LENGTH)
            out.square().sum().backward()
        context.finish_gradients()
        context.end_batch()
        m, k, n, p = ROWS * LENGTH, IN, OUT, ranks.num_ranks
        inputs, weights, outputs = (y - 1) * m * k // p, (x - 1) * k * n // p, (z - 1) * m * n // p
        of_weights = weights * (1 if keeps else microbatches)
        expected = 8 * (microbatches * (inputs + outputs) + of_weights)
        assert received() == {"gather": expected, "scatter": expected}
        parameters[keeps] = [parameter.grad for parameter in layer.parameters()]
        assert not context._gathered and not context.is_in_batch
    for once, each in zip(parameters[True], parameters[False], strict=True):
        assert once is not None and each is not None and error(once, each) < 1e-12


def received() -> dict[str, int]:
    """By kind of collective, in bytes."""
    return {kind: CountingAxis.received[kind] for kind in ("gather", "scatter")}


def traffic(meshes: list[Sizes]) -> None:
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            assert all((ranks.axis(name).group is None) == (size == 1) for name, size in zip("xyz", sizes, strict=True))
            for style, axes in STYLES.values():
                for keep in ("gathered", "shards"):
                    check_traffic(ranks, style, axes, keep, autocast=False)
                check_traffic(ranks, style, axes, "gathered", autocast=True)
            check_batch(ranks, microbatches=3)
            assert set(+CountingAxis.received) <= {"gather", "scatter"}  # no other collective


@pytest.mark.parametrize(
    "meshes",
    [list(g) for _, g in groupby(sorted(MESH_SIZES, key=prod), key=prod)],
    ids=lambda meshes: f"{prod(meshes[0])} ranks",
)
def test_communicates_and_saves_what_the_formulas_say(pool: Pool, meshes: list[Sizes]) -> None:
    pool.run(prod(meshes[0]), traffic, meshes)


class Pair(nn.Module):
    """Two layers of torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(IN, OUT), nn.Linear(OUT, IN)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def sharded_pair(ranks: Mesh) -> tuple[list[Linear3D], Tensor]:
    """The same layers over the mesh after a backward, and this rank's part of the loss, a mean over all ranks."""
    torch.manual_seed(0)
    context = StageContext(ranks)
    layers = [Linear3D(IN, OUT, context=context), Linear3D(OUT, IN, context=context, style=SEQUENCE.row_parallel())]
    x = data()
    loss = layers[1](torch.tanh(layers[0](part(x, ranks, "x", "y", "z")))).square().sum() / x.numel()
    loss.backward()
    return layers, loss.detach()


def data() -> Tensor:
    return torch.randn(ROWS, LENGTH, IN, generator=torch.Generator().manual_seed(1))


def compare(ranks: Mesh, other: Pair, loss: Tensor) -> None:
    """Compare gradients, which are DTensors in `other`, with those of the 3-D layers."""
    layers, own_loss = sharded_pair(ranks)
    assert error(own_loss, loss.detach()) < 1e-5
    for layer, its in zip(layers, (other.up, other.down), strict=True):
        for name, shard in shards_of(layer).items():
            parameter = layer._parameters[name]
            assert parameter is not None and parameter.grad is not None
            own = parameter.grad
            if shard.partial:
                own = ranks.axis(shard.partial).all_reduce(own.clone()).wait()
            whole = getattr(its, name).grad.full_tensor()
            assert error(own, shard.of(whole, ranks)) < 1e-5


def equals_fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    with process_group():
        ranks = make_mesh((4, 1, 1))
        other = Pair()
        mesh = init_device_mesh("cpu", (4,))
        for module in (other.up, other.down, other):
            fully_shard(module, mesh=mesh)
        rows = part(data(), ranks, "x").flatten(0, 1)  # it warns of views, which three dimensions come out as
        loss = other(rows).square().mean()
        loss.backward()
        compare(ranks, other, loss / 4)  # the mean of its samples, a quarter of all
        dist.barrier()


def equals_tensor_parallel() -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with process_group():
        ranks = make_mesh((1, 4, 1))
        mesh = init_device_mesh("cpu", (4,))
        styles = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        other = parallelize_module(Pair(), mesh, styles)
        loss = other(part(data(), ranks, "", "y")).square().sum() / data().numel()
        loss.backward()
        assert isinstance(other, Pair)
        compare(ranks, other, loss)
        dist.barrier()


@pytest.mark.parametrize("reference", [equals_fsdp, equals_tensor_parallel])
def test_special_meshes_equal_fsdp_and_tensor_parallelism(pool: Pool, reference: object) -> None:
    assert callable(reference)
    pool.run(4, reference)


def test_what_does_not_divide_is_refused() -> None:
    """Sizes that don't divide are an error, never a layer that isn't sharded, or a wrong sum."""
    context = StageContext(Mesh((1, 2, 3), 0, lambda names: None))
    with pytest.raises(HanayoError, match=r"Linear3D has 8 out-features, which don't divide over y \* z = 6"):
        Linear3D(6, 8, context=context)
    with pytest.raises(HanayoError, match="8 in-features, which don't divide over z = 3"):
        Linear3D(8, 6, context=context)
    Linear3D(6, 8, context=context, style=BATCH)


def test_code_outside_cannot_compute_with_a_shard() -> None:
    layer = Linear3D(IN, OUT, context=StageContext(Mesh.single()))
    assert layer.weight.shape == (OUT, IN) and layer.weight.dtype is torch.float32
    for use in (
        lambda: nn.functional.linear(torch.ones(IN), layer.weight),
        lambda: layer.weight.sum(),
        lambda: layer.weight @ torch.ones(IN),
        lambda: torch.nn.utils.parameters_to_vector([layer.weight]),
    ):
        with pytest.raises(UnsupportedError, match="Call the layer itself"):
            use()
