"""3-D attention equals torch's for every way of calling it, in both styles, and with fewer k and v heads."""

from copy import deepcopy
from itertools import cycle
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor_parallel.layers.attention import MultiheadAttention3D, parallelize_attention
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import BATCH, SEQUENCE, Keep
from lightning_hanayo.tensor_parallel.sharding import shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from lightning_hanayo.topology import Topology
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.tensor3d.comparing import gradient_errors, too_large

E, HEADS, BATCH_SIZE, LENGTH, MEMORY = 16, 4, 8, 6, 4
ALONE = Mesh.single()
SELF: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"need_weights": True},
    "weights of all heads": {"need_weights": True, "average_attn_weights": False},
    "causal": {"attn_mask": "causal", "is_causal": True},
    "causal, padded": {"attn_mask": "later", "is_causal": True, "key_padding_mask": "bool"},
    "3-D, padded": {"attn_mask": "each", "key_padding_mask": "float"},
}


def masks(how: dict[str, Any], keys: int) -> dict[str, Tensor]:
    """Masks of whole sequences. The first key is always allowed."""
    each = torch.randn(BATCH_SIZE, HEADS, LENGTH, keys, dtype=torch.float64)
    padding = torch.rand(BATCH_SIZE, keys) < 0.5
    padding[:, 0] = False
    kinds = {
        "causal": nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64),
        "later": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1),
        "each": each.flatten(0, 1),
        "bool": padding,
        "float": each[:, 0, 0],
    }
    return {name: kinds[how[name]] for name in ("attn_mask", "key_padding_mask") if name in how}


def attended(
    ranks: Mesh, reference: Any, module: Any, inputs: list[Tensor], how: dict[str, Any], outer: tuple[str, ...]
) -> dict[str, float]:
    """Errors of outputs, weights and all gradients. `inputs`: x, or x and a memory, or query, key and value."""
    is_first = reference.batch_first
    axes = outer if is_first else (outer[1], outer[0], outer[2])
    wholes = [(x if is_first else x.transpose(0, 1)).clone().requires_grad_() for x in inputs]
    parts = [part(x.detach(), ranks, *axes).requires_grad_() for x in wholes]
    which = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}[len(inputs)]
    whole_masks = masks(how, inputs[which[1]].shape[1])
    own_masks = dict(whole_masks)
    for name, mask in whole_masks.items():
        if mask.dim() == 3:
            own_masks[name] = part(mask.unflatten(0, (-1, HEADS)), ranks, "x").flatten(0, 1)
        elif name == "key_padding_mask":
            own_masks[name] = part(mask, ranks, "x")
    options = {"need_weights": False} | {k: v for k, v in how.items() if k not in whole_masks}
    y, weights = reference(*(wholes[i] for i in which), **whole_masks, **options)
    own, own_weights = module(*(parts[i] for i in which), **own_masks, **options)
    gradient = torch.randn_like(y)
    ((y * gradient).sum() + (0 if weights is None else weights.square().sum())).backward()
    rows = "x" if outer[0] == "x" else "xz"
    ((own * part(gradient, ranks, *axes)).sum() + (0 if weights is None else own_weights.square().sum())).backward()
    errors = {"y": error(own, part(y.detach(), ranks, *axes))}
    assert (weights is None) == (own_weights is None)
    if weights is not None:
        errors["weights"] = error(own_weights, part(weights.detach(), ranks, rows))
    for i, (x, whole) in enumerate(zip(parts, wholes, strict=True)):
        assert whole.grad is not None
        errors[f"dx {i}"] = error(x.grad, part(whole.grad, ranks, *axes))
    return errors | gradient_errors(module, reference, ranks)


def pair(ranks: Mesh, keep: Keep, style: Any = None, **options: Any) -> tuple[Any, Any]:
    """A layer of torch, and its copy parallelized in place. Biases are random, not torch's zeros."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        module = nn.MultiheadAttention(E, HEADS, dtype=torch.float64, **options)
        if module.in_proj_bias is not None:
            nn.init.normal_(module.in_proj_bias)
            nn.init.normal_(module.out_proj.bias)
        made.append(module)
    before = dict(made[1].named_parameters())
    parallelize_attention(made[1], StageContext(ranks, keep), style)
    assert all(parameter is before[name] for name, parameter in made[1].named_parameters())
    assert list(made[1].state_dict()) == list(made[0].state_dict())
    return made[0], made[1]


def all_attentions(ranks: Mesh) -> dict[str, float]:
    """Every way of calling it."""
    x, memory, other = (torch.randn(BATCH_SIZE, n, E, dtype=torch.float64) for n in (LENGTH, MEMORY, MEMORY))
    cases = {}
    for kind, keep in zip(SELF, cycle(("gathered", "shards")), strict=False):
        reference, module = pair(ranks, keep, batch_first=True)
        cases[f"{kind} {keep}"] = attended(ranks, reference, module, [x], SELF[kind], ("x", "y", "z"))
    for keep in ("gathered", "shards"):
        reference, module = pair(ranks, keep, bias=False)
        cases[f"seq first {keep}"] = attended(ranks, reference, module, [x], SELF["3-D, padded"], ("x", "y", "z"))
        reference, module = pair(ranks, keep, batch_first=True)
        how = {"key_padding_mask": "bool"}
        cases[f"cross {keep}"] = attended(ranks, reference, module, [x, memory], how, ("x", "y", "z"))
        reference, module = pair(ranks, keep, batch_first=True, kdim=8, vdim=12)
        inputs = [x, memory[..., :8], other[..., :12]]
        cases[f"dims {keep}"] = attended(ranks, reference, module, inputs, how, ("x", "y", "z"))
        reference, module = pair(ranks, keep, BATCH, batch_first=True)
        how = SELF["3-D, padded"] | {"need_weights": True}
        cases[f"batch {keep}"] = attended(ranks, reference, module, [x], how, ("xy", "", "z"))
    return {f"{name}: {what}": value for name, case in cases.items() for what, value in case.items()}


def attentions(meshes: list[Sizes]) -> dict[str, float]:
    errors = {}
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            cases = {"": all_attentions(ranks)}
            drops(ranks)
            if ranks.size("y") > 1:
                pads(ranks)
            casts(ranks)
            shards_make_up_the_whole(ranks)
            errors |= {f"{sizes} {name} {w}": e / 1e-10 for name, case in cases.items() for w, e in case.items()}
    return errors


def drops(ranks: Mesh) -> None:
    """Dropout masks differ between the ranks of heads; default generators stay equal."""
    module = MultiheadAttention3D(E, HEADS, dropout=0.5, batch_first=True, context=StageContext(ranks))
    x = torch.ones(4, LENGTH // ranks.size("y"), E // ranks.size("z"))
    torch.manual_seed(0)
    _, weights = module(x, x, x, average_attn_weights=False)
    masks = (weights == 0).flatten(2).float().mean(0)
    assert len({tuple(mask.tolist()) for mask in masks}) == HEADS and 0.3 < (weights == 0).float().mean() < 0.7
    state = torch.get_rng_state()
    torch.manual_seed(0)
    module(x, x, x, need_weights=False)
    assert torch.equal(torch.get_rng_state(), state)
    before = torch.get_rng_state()
    module.eval()(x, x, x)
    assert torch.equal(torch.get_rng_state(), before)
    module.projections.context.begin_batch()  # waits for prefetched weights: their buffers must not be freed in flight


def pads(ranks: Mesh) -> None:
    """A sequence of 5 in parts of 3: the padding takes no part, in a deep copy either."""
    reference, module = pair(ranks, "shards", batch_first=True)
    module.projections.context.before_forward(LENGTH - 1)
    x = torch.randn(BATCH_SIZE, LENGTH, E, dtype=torch.float64)
    own, whole = part(x, ranks, "x", "y", "z").requires_grad_(), x[:, :-1].clone().requires_grad_()
    twin = deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()  # the copy has weights of its own
    y = reference(whole, whole, whole, need_weights=False)[0]
    own_y = twin(own, own, own, need_weights=False)[0]
    last = ranks.index("y") == ranks.size("y") - 1
    kept = slice(0, own.shape[1] - 1 if last else None)
    expected = part(pad(y.detach(), (0, 0, 0, 1)), ranks, "x", "y", "z")
    assert error(own_y[:, kept], expected[:, kept]) < 1e-10
    y.square().sum().backward()
    own_y[:, kept].square().sum().backward()
    assert whole.grad is not None
    assert error(own.grad, part(pad(whole.grad, (0, 0, 0, 1)), ranks, "x", "y", "z")) < 1e-10
    assert module.out_proj._parameters["weight"].grad is None
    assert max(gradient_errors(twin, reference, ranks).values()) < 1e-10


def casts(ranks: Mesh) -> None:
    """Under autocast all collectives are in bf16."""
    module = MultiheadAttention3D(E, HEADS, batch_first=True, context=StageContext(ranks))
    x = part(torch.randn(BATCH_SIZE, LENGTH, E), ranks, "x", "y", "z")
    CountingAxis.received.clear()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = module(x, x, x, need_weights=False)
    x_size, y_size, z_size = ranks.sizes
    whole, weights = BATCH_SIZE * LENGTH * E // ranks.num_ranks, 4 * E * E // ranks.num_ranks
    expected = (y_size - 1) * whole + (z_size - 1) * whole + (x_size - 1) * weights
    assert y.dtype is torch.bfloat16 and CountingAxis.received["gather"] == 2 * expected


def shards_make_up_the_whole(ranks: Mesh) -> None:
    """The ranks' shards make up the parameters in torch's order of rows."""
    module = MultiheadAttention3D(E, HEADS, context=StageContext(ranks))
    for shard in shards_of(module).values():
        whole = torch.arange(float(prod(shard.shape))).view(shard.shape)
        read = torch.zeros_like(whole)
        for rank in range(ranks.num_ranks):
            place = Topology(cube=ranks.sizes).coordinates(rank)[2:]
            shard.put(read, shard.of(whole, ranks, place), ranks, place)
        assert torch.equal(read, whole)
    with pytest.raises(UnsupportedError, match="linear"):
        nn.functional.linear(torch.ones(E), module.in_proj_weight)


MESHES: list[list[Sizes]] = [[(2, 2, 1)], [(2, 2, 2)], [(1, 2, 2), (2, 1, 2)]]


@pytest.mark.parametrize("meshes", covered(MESHES, by=[MESHES[0], MESHES[2]]), ids=str)
def test_equals_torchs_attention(pool: Pool, meshes: list[Sizes]) -> None:
    assert too_large(pool.run(prod(meshes[0]), attentions, meshes)) == []


def test_options_that_are_refused() -> None:
    context = StageContext(ALONE)
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(UnsupportedError, match=option):
            MultiheadAttention3D(E, HEADS, context=context, **{option: True})
    with pytest.raises(HanayoError, match="is for batch_first=True"):
        MultiheadAttention3D(E, HEADS, context=context, style=SEQUENCE)
    with pytest.raises(UnsupportedError, match="batch_first=True"):
        MultiheadAttention3D(E, HEADS, context=context, style=BATCH)
    three = Mesh((1, 3, 1), 0, lambda names: None)
    with pytest.raises(HanayoError, match=r"4 heads, which don't divide over y \* z = 3"):
        MultiheadAttention3D(E, HEADS, context=StageContext(three))
    module = MultiheadAttention3D(E, HEADS, context=context)
    with pytest.raises(UnsupportedError, match=r"not \(4, 16\)"):
        module(*3 * [torch.ones(4, E)])
    with pytest.raises(HanayoError, match="is_causal"):
        module(*3 * [torch.ones(4, 1, E)], is_causal=True)
