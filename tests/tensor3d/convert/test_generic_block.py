"""Linear layers of generic blocks: every rank passes tokens of its own, many or none, and gets its own back."""

from copy import deepcopy
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lightning_hanayo.tensor_parallel.collectives import all_to_all, split_dim
from lightning_hanayo.tensor_parallel.convert.generic_block import Communicated, cheapest, parallelize_generic_linear
from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
from lightning_hanayo.tensor_parallel.layers.linear import LinearSharding, ShardedProduct
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import AxisCollective, Keep
from lightning_hanayo.tensor_parallel.sharding import shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, process_group
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.tensor3d.comparing import gradient_errors, reduced, too_large

TOKENS, WIDTH = 5, 12
COMMUNICATED: tuple[Communicated, ...] = ("activations", "weight")


class Mixer(nn.Module):
    """Mixes tokens, by a linear layer over the transposed input, then features; residual sums around both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.token_up, self.token_down = nn.Linear(TOKENS, 7), nn.Linear(7, TOKENS)
        self.up, self.down = Conv1D(9, WIDTH), nn.Linear(9, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, TOKENS, WIDTH] to the same."""
        x = x + self.token_down(gelu(self.token_up(self.norm(x).transpose(1, 2)))).transpose(1, 2)
        out: Tensor = x + self.gain * self.down(gelu(self.up(x)))
        return out


class ReadsWeights(Mixer):
    """Computes with the weights of its layers itself, in a part that the backward runs again, and with all of them."""

    def forward(self, x: Tensor) -> Tensor:
        """[samples, TOKENS, WIDTH] to the same."""
        scale = torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()
        x = super().forward(x) / (1 + scale + self.token_up.weight.detach().abs().max())
        out: Tensor = checkpoint(
            lambda x: gelu(x @ self.up.weight + self.up.bias) @ self.down.weight.T, x, use_reentrant=False
        )
        return x + out

    def tied(self, x: Tensor) -> Tensor:
        return gelu(x @ self.up.weight + self.up.bias) @ self.down.weight.T


def shares(ranks: int) -> list[int]:
    """Samples of each rank: none for some."""
    return [(3, 0, 1, 2)[rank % 4] for rank in range(ranks)]


def mixed(ranks: Mesh, tokens: int, keep: Keep, block_class: type[Mixer]) -> dict[str, float]:
    """Two generic blocks: errors of everything, including parameters that aren't converted."""
    torch.manual_seed(0)
    reference = nn.ModuleList(block_class() for _ in range(2)).double()
    blocks = deepcopy(reference)
    plan = plan_parallelize(list(blocks), "blocks", ranks.sizes, tokens=tokens)
    assert not plan.is_registered and plan.streams == ()
    plan.install(list(blocks), StageContext(ranks, keep))
    counts = shares(ranks.num_ranks)
    x, gradient = torch.randn(2, sum(counts), TOKENS, WIDTH, dtype=torch.float64)
    where = ranks.index("xyz")
    own, own_gradient = (whole.split(counts)[where].clone() for whole in (x, gradient))
    y, own_y = x.requires_grad_(), own.requires_grad_()
    for block, whole_block in zip(blocks, reference, strict=True):
        y, own_y = whole_block(y), block(own_y)
    y.backward(gradient)
    own_y.backward(own_gradient)
    assert x.grad is not None and own.grad is not None
    errors = gradient_errors(blocks, reference, ranks)
    errors |= unconverted_gradients(blocks, reference, ranks)
    assert len(errors) == len(list(reference.parameters()))
    if counts[where]:
        errors["y"] = error(own_y, y.split(counts)[where].detach())
        errors["dx"] = error(own.grad, x.grad.split(counts)[where])
    return {what: value / 1e-10 for what, value in errors.items()}


def unconverted_gradients(blocks: nn.Module, reference: nn.Module, ranks: Mesh) -> dict[str, float]:
    """Of parameters that aren't converted: their sum over all ranks is the gradient of the whole block."""
    errors = {}
    for path, module in blocks.named_modules():
        if not shards_of(module):
            for name, parameter in module._parameters.items():
                twin = reference.get_submodule(path)._parameters[name]
                if parameter is not None and twin is not None and twin.grad is not None:
                    whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    errors[f"{path}.{name}"] = error(ranks.axis("xyz").all_reduce(whole.clone()).wait(), twin.grad)
    return errors


def uneven(ranks: Mesh, communicated: Communicated, sizes: tuple[int, int]) -> dict[str, float]:
    """One layer whose features divide over nothing."""
    torch.manual_seed(1)
    reference = nn.Linear(*sizes, dtype=torch.float64)
    layer: Any = deepcopy(reference)
    parallelize_generic_linear(layer, StageContext(ranks), communicated)
    x = torch.randn(ranks.num_ranks, 2, sizes[0], dtype=torch.float64)
    reference(x).square().sum().backward()
    y = layer(x[ranks.index("xyz")])
    y.square().sum().backward()
    errors = {"y": error(y, reference(x)[ranks.index("xyz")].detach())}
    for name, shard in shards_of(layer).items():
        whole, own = reference._parameters[name], layer._parameters[name]
        assert whole is not None and own is not None and whole.grad is not None
        errors[name] = error(reduced(own.grad, shard, ranks), shard.of(whole.grad, ranks))
    return {what: value / 1e-10 for what, value in errors.items()}


def everything(meshes: list[Sizes]) -> dict[str, float]:
    """In units of what is allowed."""
    errors: dict[str, float] = {}
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            kinds = (1, "gathered", Mixer), (10**6, "shards", Mixer), (1, "shards", ReadsWeights)
            for tokens, keep, block_class in (*kinds, (10**6, "gathered", ReadsWeights)):
                case = mixed(ranks, tokens, keep, block_class)  # type: ignore[arg-type]
                what = f"{sizes} {block_class.__name__} {tokens} {keep}"
                errors |= {f"{what} {name}": value for name, value in case.items()}
            for communicated, features in product(COMMUNICATED, ((5, 9), (3, 1), (1, 7))):
                case = uneven(ranks, communicated, features)
                errors |= {f"{sizes} {communicated} {features} {what}": value for what, value in case.items()}
    return errors


MESHES: list[list[Sizes]] = [[(1, 2, 1)], [(1, 2, 2), (2, 1, 2)], [(2, 2, 2)]]


@pytest.mark.parametrize("meshes", covered(MESHES, by=MESHES[:1]), ids=lambda meshes: f"{prod(meshes[0])} ranks")
def test_generic_blocks_equal_themselves_run_whole(pool: Pool, meshes: list[Sizes]) -> None:
    assert too_large(pool.run(prod(meshes[0]), everything, meshes)) == []


def own_tokens_return(sizes: Sizes) -> tuple[bool, bool]:
    """Whether an identity returns each rank's tokens, as it is and with both collectives on one dimension."""
    with process_group():
        ranks = make_mesh(sizes)
        own = torch.full((3, 4), float(ranks.index("xyz")), dtype=torch.float64)
        layer: Any = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        nn.init.eye_(layer.weight)
        parallelize_generic_linear(layer, StageContext(ranks), "activations")
        return torch.equal(layer(own), own), torch.equal(on_one_dimension(layer, own, ranks), own)


def on_one_dimension(layer: Any, own: Tensor, ranks: Mesh) -> Tensor:
    """The layer with both collectives on one dimension: tokens return with y and z exchanged."""
    own_weight, along = layer.sharding.product.weight, (AxisCollective("y", 0), AxisCollective("z", 0))
    layer.sharding.product = ShardedProduct(own_weight, layer.sharding.context, *along)
    columns = all_to_all(split_dim(own, ranks.size("z"), 1), ranks.axis("z"))
    y = LinearSharding.forward(layer.sharding, columns, None)
    return all_to_all(y, ranks.axis("y")).movedim(0, 1).flatten(1)


def test_tokens_in_another_order_would_be_noticed(pool: Pool) -> None:
    right, wrong = zip(*pool.run(4, own_tokens_return, (1, 2, 2)), strict=True)
    assert all(right) and not all(wrong)


def received(sizes: Sizes, features: tuple[int, int], counts: list[int]) -> list[dict[Communicated, int]]:
    """What this rank receives in a forward and a backward of so many tokens per rank, in fp64 elements."""
    with process_group():
        ranks = make_mesh(sizes)
        return [
            {communicated: num_received(ranks, communicated, features, rows) for communicated in COMMUNICATED}
            for rows in counts
        ]


def num_received(ranks: Mesh, communicated: Communicated, features: tuple[int, int], rows: int) -> int:
    layer = nn.Linear(*features[::-1], dtype=torch.float64)
    parallelize_generic_linear(layer, StageContext(ranks), communicated)
    CountingAxis.received.clear()
    layer(torch.randn(rows, features[1], dtype=torch.float64, requires_grad=True)).sum().backward()
    return sum(nbytes for kind, nbytes in CountingAxis.received.items() if kind != "reduce") // 8


def test_the_cheaper_of_both_is_communicated(pool: Pool) -> None:
    sizes, features, counts = (2, 2, 2), (16, 8), [2, 64]
    for numbers in pool.run(8, received, sizes, features, counts):
        assert numbers == [{"activations": 176, "weight": 224}, {"activations": 4640, "weight": 224}]
    assert [cheapest(features, 8 * rows, sizes) for rows in counts] == ["activations", "weight"]
