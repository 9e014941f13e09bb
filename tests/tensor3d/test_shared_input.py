"""Layers that read one input are one product: outputs and gradients are those of torch's layers, however they are used.

x [batch/x, seq/y, K/z]  --one gather, one product, one sum-->  q, k, v of unequal sizes
"""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.tensor_parallel.layers.linear import Linear3D, SharedInput
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import SEQUENCE, Keep
from lightning_hanayo.tensor_parallel.sharding import shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.harness.thorough import covered

IN, OUTS = 12, {"q": 24, "k": 12, "v": 12}
ORDINARY = lambda layers, x: [layers[name](x) for name in layers]  # noqa: E731
USES: dict[str, Callable[[Any, Tensor], list[Tensor]]] = {
    "once each": ORDINARY,
    "one not at all": lambda layers, x: [layers["q"](x), layers["k"](x)],
    "one twice, in another order": lambda layers, x: [layers["v"](x), layers["q"](x), layers["q"](x), layers["k"](x)],
    "another input": lambda layers, x: [layers["q"](2 * x), layers["k"](x), layers["v"](x)],
    "the input itself": lambda layers, x: [*ORDINARY(layers, x), x],
    "the input in place": lambda layers, x: ORDINARY(layers, x.mul_(2)),
    "as one row": lambda layers, x: [y.view(-1).view(y.shape) for y in ORDINARY(layers, x)],
    "in place": lambda layers, x: [layers[name](x).mul_(2) for name in layers],
}


def make_layers(context: StageContext | None) -> tuple[nn.ModuleDict, SharedInput | None]:
    """Torch's layers, or 3-D ones with the same values."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float64}
    if context is None:
        return nn.ModuleDict({name: nn.Linear(IN, out, name != "k", **options) for name, out in OUTS.items()}), None
    shared = SharedInput(context, SEQUENCE)
    options |= {"context": context, "shared_input": shared}
    return nn.ModuleDict({name: Linear3D(IN, out, name != "k", **options) for name, out in OUTS.items()}), shared


def prepare(layers: nn.ModuleDict, what: str) -> list[Any]:
    """Freeze one layer, or watch the gradient of one. Returns what the hook sees."""
    seen: list[Any] = []
    if what == "one frozen":
        layers["k"].requires_grad_(False)
    elif what == "one watched":
        layers["v"]._parameters["weight"].register_hook(seen.append)  # type: ignore[union-attr]
    return seen


def compare(ranks: Mesh, keep: Keep, use: str, what: str) -> dict[str, float]:
    """Errors of outputs and gradients."""
    queue = WeightGradientQueue() if what == "deferred" else None
    context = StageContext(ranks, keep, queue, num_pieces=2 if what == "in pieces" else 1)
    (reference, _), (own, shared) = make_layers(None), make_layers(context)
    assert shared is not None
    seen, x = prepare(own, what), torch.randn(4, 4, IN, dtype=torch.float64)
    prepare(reference, what)
    own_x = part(x, ranks, "x", "y", "z").requires_grad_()
    x.requires_grad_()

    def forward(x: Tensor) -> list[Tensor]:
        ys = USES[use](own, shared.all_gather(x.clone()))
        shared.clear()
        return ys

    whole_x = x.clone()
    ys = USES[use](reference, whole_x)
    own_ys: Any = checkpoint(forward, own_x, use_reentrant=False) if what == "recomputed" else forward(own_x)
    # The gathered input has features along z only, and is the same along y: its gradients are partial sums.
    axes = [("x", "", "z") if y is whole_x else ("x", "", "yz") for y in ys]
    errors = {
        f"y{i}": error(b, part(a.detach(), ranks, *c)) for i, (a, b, c) in enumerate(zip(ys, own_ys, axes, strict=True))
    }
    weights = [torch.randn_like(y) for y in ys]
    sum((y * w).sum() for y, w in zip(ys, weights, strict=True)).backward()  # type: ignore[union-attr]
    total: Any = sum(
        (y * part(w, ranks, *c)).sum() / (ranks.size("y") if len(c[2]) == 1 else 1)
        for y, w, c in zip(own_ys, weights, axes, strict=True)
    )
    if queue is None:
        total.backward()
    else:
        with queue.collecting(0):
            total.backward()
        assert all(layer._parameters["weight"].grad is None for layer in own.values())  # type: ignore[union-attr]
        queue.drain(0)
    assert x.grad is not None
    errors["dx"] = error(own_x.grad, part(x.grad, ranks, "x", "y", "z"))
    for name, layer in own.items():
        assert isinstance(layer, Linear3D)
        gradient, shard = layer._parameters["weight"].grad, shards_of(layer)["weight"]  # type: ignore[union-attr]
        expected = reference[name].weight.grad
        if expected is None:
            assert gradient is None, f"{name} gets a gradient, for which AdamW would decay it"
        else:
            errors[name] = error(gradient, shard.of(expected, ranks))  # type: ignore[arg-type]
    assert len(seen) == (what == "one watched")
    return {f"{ranks.sizes} {keep} {use} {what} {key}": value for key, value in errors.items()}


CASES = [(use, "") for use in USES] + [
    ("once each", what) for what in ("one frozen", "one watched", "deferred", "recomputed", "in pieces")
]


def everything(meshes: list[Sizes]) -> dict[str, float]:
    errors: dict[str, float] = {}
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            for keep in ("gathered", "shards"):
                for use, what in CASES:
                    errors |= compare(ranks, keep, use, what)
            counts(ranks)
    return errors


def counts(ranks: Mesh) -> None:
    """The forward sends x and the weights once, and the outputs; nothing more than three separate layers would."""
    context = StageContext(ranks)
    layers, shared = make_layers(context)
    assert shared is not None
    x = torch.randn(4 // ranks.size("x"), 4 // ranks.size("y"), IN // ranks.size("z"), dtype=torch.float64)
    CountingAxis.received.clear()
    ORDINARY(layers, shared.all_gather(x))
    (sx, sy, sz), n = ranks.sizes, sum(OUTS.values())
    weights = (sx - 1) * n * IN // ranks.num_ranks
    assert CountingAxis.received["gather"] == 8 * (x.numel() * (sy - 1) + weights)
    assert CountingAxis.received["scatter"] == 8 * (4 // sx * 4 * n // (sy * sz) * (sz - 1))


MESHES: list[list[Sizes]] = [[(1, 2, 2)], [(4, 1, 1), (2, 1, 2)], [(2, 2, 2)]]


@pytest.mark.parametrize("meshes", covered(MESHES, by=MESHES[:1]), ids=lambda meshes: f"{prod(meshes[0])} ranks")
def test_several_layers_of_one_input_equal_torchs(pool: Pool, meshes: list[Sizes]) -> None:
    for errors in pool.run(prod(meshes[0]), everything, meshes):
        assert {what: value for what, value in errors.items() if not value <= 1e-10} == {}


def test_unequal_parts_that_do_not_divide_are_padded(pool: Pool) -> None:
    assert pool.run(3, padded_parts) == [True] * 3


def padded_parts() -> bool:
    """Three ranks along x share 24, 12 and 12 rows evenly, and 4 rows of one more layer unevenly."""
    with process_group():
        ranks = make_mesh((3, 1, 1))
        context = StageContext(ranks)
        torch.manual_seed(0)
        whole = [nn.Linear(IN, n, False, dtype=torch.float64) for n in (4, 6)]
        torch.manual_seed(0)
        shared = SharedInput(context, SEQUENCE)
        own = [Linear3D(IN, n, False, context=context, shared_input=shared, dtype=torch.float64) for n in (4, 6)]
        x = torch.randn(3, 2, IN, dtype=torch.float64)
        mine = part(x, ranks, "x")
        gathered = shared.all_gather(mine)
        ys, expected = [layer(gathered) for layer in own], [layer(x) for layer in whole]
        sum(y.sum() for y in ys).backward()  # type: ignore[union-attr]
        sum(y.sum() for y in expected).backward()  # type: ignore[union-attr]
        right = [error(y, part(e.detach(), ranks, "x")) < 1e-10 for y, e in zip(ys, expected, strict=True)]
        for layer, twin in zip(own, whole, strict=True):
            gradient = layer._parameters["weight"].grad  # type: ignore[union-attr]
            right.append(error(gradient, shards_of(layer)["weight"].of(twin.weight.grad, ranks)) < 1e-10)  # type: ignore[arg-type]
        return all(right)
