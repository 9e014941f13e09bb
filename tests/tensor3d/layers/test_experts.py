"""Shared experts equal those of one process, whatever tokens choose, and a token is sent once to each rank."""

from copy import deepcopy
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.graph_boundary import recompute
from lightning_hanayo.tensor_parallel.layers.experts import ExpertSharding, is_fused_experts
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, process_group
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.tensor3d.comparing import gradient_errors, too_large

WIDTH, CHOSEN = 6, 2


def experts(kind: str, number: int, implementation: str = "eager") -> Any:
    from transformers import GptOssConfig, MixtralConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    configs, classes = (MixtralConfig, GptOssConfig), (MixtralExperts, GptOssExperts)
    of = ("mixtral", "gpt_oss").index(kind)
    config = configs[of](hidden_size=WIDTH, intermediate_size=4, num_local_experts=number)
    config._experts_implementation = implementation
    layer = classes[of](config).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def choices(tokens: int, number: int) -> Tensor:
    """Each token's experts, but never the last one."""
    return torch.stack([torch.randperm(number - 1)[:CHOSEN] for _ in range(tokens)])


def compared(ranks: Mesh, kind: str, number: int, implementation: str, *, again: bool) -> dict[str, float]:
    """One layer; `again`: recomputed in the backward."""
    torch.manual_seed(0)
    whole = experts(kind, number, implementation)
    layer, context = deepcopy(whole), StageContext(ranks)
    ExpertSharding(context, number).attach(layer)
    assert isinstance(layer, type(whole)) and layer.num_experts == number
    counts = [(3, 1, 5, 2)[rank % 4] for rank in range(ranks.num_ranks)]
    x, gradient = torch.randn(2, sum(counts), WIDTH, dtype=torch.float64)
    weights, index = torch.rand(sum(counts), CHOSEN, dtype=torch.float64), choices(sum(counts), number)
    where = ranks.index("xyz")
    own = [one.split(counts)[where].clone() for one in (x, weights, gradient)]
    inputs = [one.requires_grad_() for one in (x, weights, *own[:2])]
    if again:
        recompute([layer])
    y = whole(x, index, weights)
    own_y = layer(inputs[2], index.split(counts)[where], inputs[3])
    y.backward(gradient)
    own_y.backward(own[2])
    errors = gradient_errors(layer, whole, ranks)
    assert len(errors) == len(list(whole.parameters()))
    errors["y"] = error(own_y, y.split(counts)[where].detach())
    for name, mine, other in (("dx", inputs[2], x), ("dw", inputs[3], weights)):
        assert other.grad is not None
        errors[name] = error(mine.grad, other.grad.split(counts)[where])
    return {what: value / 1e-10 for what, value in errors.items()}


def everything(sizes: Sizes) -> dict[str, float]:
    errors = {}
    with process_group():
        ranks = make_mesh(sizes)
        for kind, number, again in (("mixtral", 5, False), ("mixtral", 3, True), ("gpt_oss", 4, True)):
            for implementation in ("eager", "batched_mm"):
                case = compared(ranks, kind, number, implementation, again=again)
                errors |= {f"{kind} {number} {implementation} {what}": value for what, value in case.items()}
    return errors


MESHES = covered([((1, 2, 1),), ((1, 2, 2),), ((2, 1, 2),), ((1, 1, 4),)], by=[((1, 2, 2),)])


@pytest.mark.parametrize(("sizes",), MESHES, ids=str)
def test_shared_experts_equal_whole_ones(pool: Pool, sizes: Sizes) -> None:
    assert too_large(pool.run(prod(sizes), everything, sizes)) == []


def sent(sizes: Sizes) -> list[dict[str, int]]:
    """Bytes that this rank receives: of a layer that is recomputed, and of one whose user recomputes it."""
    with process_group():
        ranks = make_mesh(sizes)
        found = []
        for by_user in (False, True):
            torch.manual_seed(0)
            layer = experts("mixtral", 4)
            ExpertSharding(StageContext(ranks), 4).attach(layer)
            x, weights = torch.randn(1, WIDTH, dtype=torch.float64), torch.rand(1, CHOSEN, dtype=torch.float64)
            index = torch.tensor([[0, 1]])  # both on rank 0
            CountingAxis.received.clear()
            if by_user:
                y: Any = checkpoint(layer, x.requires_grad_(), index, weights, use_reentrant=False)
            else:
                recompute([layer])
                y = layer(x.requires_grad_(), index, weights)
            y.sum().backward()
            found.append(dict(CountingAxis.received))
        return found


def test_a_token_is_sent_once_and_recomputation_reuses_the_choice(pool: Pool) -> None:
    first, second = pool.run(2, sent, (1, 1, 2))
    row, routing = 8 * WIDTH, 8 * CHOSEN
    counts, weights = 16, 8 * CHOSEN
    # forward, again, and gradients: of x and of its weights to rank 0, of y from there, of x and the weights back
    assert first[0] == {"exchange": counts, "rows": routing + 2 * (row + weights) + row}
    assert second[0] == {"exchange": counts, "rows": 3 * row}
    assert first[1] == {"exchange": 2 * counts, "rows": first[0]["rows"] + routing}


def shapes(sizes: Sizes) -> str:
    with process_group():
        layer = experts("mixtral", 4)
        ExpertSharding(StageContext(make_mesh(sizes)), 4).attach(layer)
        with pytest.raises(UnsupportedError) as refused:
            layer(torch.randn(1, 3, WIDTH), torch.zeros(3, 2, dtype=torch.long), torch.rand(3, 2))
        return str(refused.value)


def test_a_layer_that_is_called_in_another_way_is_refused(pool: Pool) -> None:
    for text in pool.run(2, shapes, (1, 2, 1)):
        assert "MixtralExperts3D is called with tensors of the shapes (1, 3, 6), (3, 2), (3, 2)" in text


def test_fused_experts_are_known_by_the_interface_of_transformers() -> None:
    assert is_fused_experts(experts("mixtral", 4)) and is_fused_experts(experts("gpt_oss", 3))
    layer = experts("mixtral", 4)
    layer.scale = torch.nn.Parameter(torch.ones(1))
    assert not is_fused_experts(layer)
    assert not is_fused_experts(torch.nn.Linear(4, 4))
