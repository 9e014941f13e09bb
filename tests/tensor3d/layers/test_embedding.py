"""3-D embeddings: any vocabulary, a global padding_idx, tied to a head with both gradients, and loaded."""

from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor_parallel.layers.embedding import (
    Embedding3D,
    Head3D,
    parallelize_embedding,
)
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import BATCH, SEQUENCE, SEQUENCE_FIRST, ParallelStyle
from lightning_hanayo.tensor_parallel.sharding import shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from lightning_hanayo.topology import Topology
from tests.harness.mesh import Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.tensor3d.comparing import gradient_errors, too_large

STYLES: dict[str, tuple[ParallelStyle, tuple[str, ...], tuple[str, ...]]] = {
    "sequence": (SEQUENCE, ("x", ""), ("x", "y", "z")),
    "sequence first": (SEQUENCE_FIRST, ("", "x"), ("y", "x", "z")),
    "batch": (BATCH, ("x", ""), ("xy", "", "z")),
}


def looked_up(ranks: Mesh, kind: str, padding: int | None) -> dict[str, float]:
    """13 rows don't divide. Id 7 is the padding; its rank has it under another local number."""
    style, inner, outer = STYLES[kind]
    torch.manual_seed(0)
    reference = nn.Embedding(13, 8, padding, dtype=torch.float64)
    torch.manual_seed(0)
    module = Embedding3D(13, 8, padding, dtype=torch.float64, context=StageContext(ranks), style=style)
    ids = torch.arange(8 * 4).view(8, 4) % 13
    y, own = reference(ids), module(part(ids, ranks, *inner))
    gradient = torch.randn_like(y)
    y.backward(gradient)
    own.backward(part(gradient, ranks, *outer))
    return {"y": error(own, part(y.detach(), ranks, *outer))} | gradient_errors(module, reference, ranks)


class Tied(nn.Module):
    """One parameter, used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 13, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embedding(ids)))
        return logits


def tied(ranks: Mesh) -> dict[str, float]:
    """Twice, so that gradients accumulate."""
    torch.manual_seed(0)
    reference = Tied()
    torch.manual_seed(0)
    module = Tied()
    context = StageContext(ranks)
    parallelize_embedding(module.embedding, context)
    module.head.__class__ = Head3D
    module.head.shard(context, SEQUENCE)  # type: ignore[operator]
    assert isinstance(module.head, Head3D) and isinstance(module.embedding, Embedding3D)
    assert module.head._parameters["weight"] is module.embedding._parameters["weight"]
    start, stop = module.head.vocabulary.span(ranks)
    errors = {}
    for seed in range(2):
        ids = torch.randint(13, (4, 4), generator=torch.Generator().manual_seed(seed))
        y, own = reference(ids), module(part(ids, ranks, "x", ""))
        y.square().sum().backward()
        own[..., : stop - start].square().sum().backward()
        errors[f"y {seed}"] = error(own[..., : stop - start], part(y.detach(), ranks, "x")[..., start:stop])
    return errors | gradient_errors(module, reference, ranks)


def saved_and_loaded(ranks: Mesh) -> None:
    """The ranks' shards make up the table."""
    whole = torch.arange(13 * 8.0).view(13, 8)
    module = Embedding3D(13, 8, _weight=whole.clone(), _freeze=True, context=StageContext(ranks))
    shard, read = shards_of(module)["weight"], torch.zeros(13, 8)
    for rank in range(ranks.num_ranks):
        place = Topology(cube=ranks.sizes).coordinates(rank)[2:]
        shard.put(read, shard.of(whole, ranks, place), ranks, place)
    own = module._parameters["weight"]
    assert torch.equal(read, whole) and own is not None and not own.requires_grad
    module.load_state_dict({"weight": 2 * own})
    ids = part(torch.arange(12).view(4, 3), ranks, "x")
    y = module(torch.cat((ids, ids[:, :1]), 1))
    expected = embedding(torch.cat((ids, ids[:, :1]), 1), 2 * whole)
    assert torch.equal(y, part(expected, ranks, "", "y", "z"))


def refusals(ranks: Mesh) -> None:
    context = StageContext(ranks)
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(UnsupportedError, match=next(iter(option))):
            Embedding3D(13, 8, context=context, **option)
    if ranks.size("z") > 1:
        with pytest.raises(HanayoError, match="7 features, which don't divide over z = 2"):
            Embedding3D(13, 7, context=context)
    module = Embedding3D(13, 8, context=context)
    with pytest.raises(UnsupportedError, match="linear"):
        nn.functional.linear(torch.ones(8), module.weight)
    with pytest.raises(RuntimeError, match="outside of the vocabulary|losed"):  # a rank may wait for one that has left
        module(torch.full((1, 4), 13))


def embeddings(meshes: list[Sizes]) -> dict[str, float]:
    errors = {}
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            cases = {f"{kind} {padding}": looked_up(ranks, kind, padding) for kind in STYLES for padding in (None, 7)}
            cases["tied"] = tied(ranks)
            saved_and_loaded(ranks)
            errors |= {f"{sizes} {name} {w}": e / 1e-10 for name, case in cases.items() for w, e in case.items()}
        refusals(ranks)
    return errors


@pytest.mark.parametrize("meshes", [[(2, 2, 2)], [(1, 2, 2), (1, 4, 1), (2, 1, 2)]], ids=["8 ranks", "4 ranks"])
def test_equals_torchs_embedding(pool: Pool, meshes: list[Sizes]) -> None:
    assert too_large(pool.run(prod(meshes[0]), embeddings, meshes)) == []
