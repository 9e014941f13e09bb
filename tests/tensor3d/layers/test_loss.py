"""The 3-D loss equals torch's, however tokens are ignored, and is finite whatever the logits."""

from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.tensor_parallel.layers.embedding import Head3D, cross_entropy3d
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import BATCH, SEQUENCE
from lightning_hanayo.tensor_parallel.sharding import DimShard
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.tensor3d.comparing import gradient_errors, too_large

KINDS = {"sequence": (SEQUENCE, ("x", "y", "z"), "x"), "batch": (BATCH, ("xy", "", "z"), "xz")}
OPTIONS: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1}, {"reduction": "sum", "ignore_index": 3}]


def headed(ranks: Mesh, kind: str, size: int, **options: Any) -> dict[str, float]:
    """A head and its loss; of 8 samples the first keeps one token, the second none."""
    style, outer, batch_axes = KINDS[kind]
    torch.manual_seed(0)
    reference = nn.Linear(8, size, dtype=torch.float64)
    torch.manual_seed(0)
    head = Head3D(8, size, dtype=torch.float64, context=StageContext(ranks), style=style)
    x, labels = 3 * torch.randn(8, 4, 8, dtype=torch.float64), torch.randint(size, (8, 4))
    labels[0, 1:] = labels[1] = options.get("ignore_index", -100)
    own = part(x, ranks, *outer).requires_grad_()
    x.requires_grad_()
    loss = cross_entropy(reference(x).flatten(0, 1), labels.flatten(), **options)
    own_labels = part(labels, ranks, batch_axes)
    own_loss = cross_entropy3d(head(own), own_labels, head.vocabulary, ranks, batch_axes=batch_axes, **options)
    (2 * loss).backward()
    (2 * own_loss).backward()
    assert x.grad is not None
    errors = {"loss": error(own_loss, loss.detach()), "dx": error(own.grad, part(x.grad, ranks, *outer))}
    return errors | gradient_errors(head, reference, ranks)


def without_head(ranks: Mesh) -> dict[str, float]:
    """Logits of any origin: 3 or 11 columns over 4 ranks, very large, in bf16; one rank has no token that counts."""
    errors = {}
    for size, dtype in ((3, torch.float64), (11, torch.float64), (11, torch.bfloat16)):
        vocabulary = DimShard(size, "yz")
        torch.manual_seed(0)
        logits, labels = (1e4 * torch.randn(12, size)).to(dtype), torch.randint(size, (12,))
        labels[5:] = -100
        own = part(logits, ranks, "x")[:, slice(*vocabulary.span(ranks))].clone().requires_grad_()
        logits.requires_grad_()
        expected = cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), labels)
        expected.backward()
        CountingAxis.received.clear()
        loss = cross_entropy3d(own, part(labels, ranks, "x"), vocabulary, ranks)
        loss.backward()
        n, rows, width = ranks.size("yz"), 12 // ranks.size("x"), expected.element_size()
        sums = 2 * 2 * width // ranks.size("x") * (ranks.size("x") - 1)
        assert CountingAxis.received["reduce"] == 2 * 3 * rows * width * (n - 1) // n + sums
        assert logits.grad is not None and own.grad is not None and own.grad.dtype is dtype
        part_of = part(logits.grad, ranks, "x")[:, slice(*vocabulary.span(ranks))]
        errors[f"{size} {dtype} loss"] = error(loss, expected.detach())
        errors[f"{size} {dtype} gradient"] = float((own.grad - part_of).abs().max()) if own.numel() else 0.0
    return errors


def uneven(ranks: Mesh) -> None:
    """The mean over tokens isn't the mean of the ranks' means. A rank without tokens has a loss too."""
    vocabulary, x = DimShard(4, "yz"), ranks.index("x")
    own = torch.full((4, 4), 0.0)[:, slice(*vocabulary.span(ranks))].requires_grad_()
    labels = torch.tensor([0, -100, -100, -100] if x == 0 else [-100] * 4)
    alone = cross_entropy3d(own, labels, vocabulary, ranks, batch_axes="")
    assert alone.item() == pytest.approx(1.3863 if x == 0 else 0.0, abs=1e-4)
    each = cross_entropy3d(own, labels, vocabulary, ranks, reduction="none")
    assert each.shape == (4,) and each[1:].eq(0).all()
    assert cross_entropy3d(own, labels, vocabulary, ranks).item() == pytest.approx(1.3863, abs=1e-4)
    nothing = cross_entropy3d(own, torch.full((4,), -100), vocabulary, ranks)
    nothing.backward()
    assert nothing.item() == 0.0 and own.grad is not None and own.grad.eq(0).all()
    with pytest.raises(HanayoError, match=r"labels \(3,\)"):
        cross_entropy3d(own, labels[:3], vocabulary, ranks)


def losses(meshes: list[Sizes]) -> dict[str, float]:
    errors = {}
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            cases = {"without head": without_head(ranks)}
            for kind in KINDS:
                for i, options in enumerate(OPTIONS):
                    cases[f"{kind} 13 {i}"] = headed(ranks, kind, 13, **options)
                cases[f"{kind} 16"] = headed(ranks, kind, 16)
            errors |= {f"{sizes} {name} {w}": e / 1e-10 for name, case in cases.items() for w, e in case.items()}
            uneven(ranks)
    return errors


@pytest.mark.parametrize("meshes", [[(2, 2, 2)], [(1, 2, 2), (1, 1, 4), (4, 1, 1)]], ids=["8 ranks", "4 ranks"])
def test_equals_torchs_cross_entropy(pool: Pool, meshes: list[Sizes]) -> None:
    assert too_large(pool.run(prod(meshes[0]), losses, meshes)) == []
