"""The stack is the outermost list of like blocks that holds the most parameters.

model.layers.0 .. 7            found
model.layers.0.experts.0 .. 3  inside another one: never
classifier (unlike layers)     no like blocks: never, unless named
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.partition.stack import find_stack, num_outside
from tests.harness import models


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(50, 50) for _ in range(4))


class Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def like(count: int, width: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


UNLIKE = nn.Sequential(nn.Linear(99, 99), nn.ReLU(), nn.Linear(99, 99))
FOUND: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "the larger one": (lambda: Holder(encoder=like(3), decoder=like(3, 5)), "decoder", 3),
    "by parameters, not by length": (lambda: Holder(long=like(9, 2), wide=like(2, 50)), "wide", 2),
    "nested": (lambda: Holder(model=Holder(inner=Holder(layers=like(4)))), "model.inner.layers", 4),
    "experts inside blocks": (lambda: Holder(layers=nn.ModuleList(Expert() for _ in range(2))), "layers", 2),
    "blocks that are lists": (
        lambda: Holder(h=nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))), "h", 3,
    ),
    "a Sequential": (lambda: Holder(body=nn.Sequential(*like(3))), "body", 3),
    "an unlike list is passed over": (lambda: Holder(head=UNLIKE, layers=like(2)), "layers", 2),
    "a list without parameters too": (
        lambda: Holder(acts=nn.ModuleList(nn.ReLU() for _ in range(20)), layers=like(2)), "layers", 2,
    ),
    "stages of an unlike list": (
        lambda: nn.Sequential(nn.Flatten(), Holder(layers=like(2)), nn.Linear(2, 2)), "1.layers", 2,
    ),
    "gpt2": (models.gpt2, "model.transformer.h", 8),
    "llama": (models.llama, "model.model.layers", 8),
    "bert": (models.bert, "model.bert.encoder.layer", 8),
    "the recipe's": (models.gpt, "blocks", 8),
    "nn.TransformerEncoder": (
        lambda: Holder(enc=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)),
        "enc.layers", 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOUND)
def test_found(kind: str) -> None:
    factory, name, count = FOUND[kind]
    model = factory()
    stack = find_stack(model)
    assert (stack.name, len(stack)) == (name, count)
    assert stack.blocks == tuple(model.get_submodule(name))
    inside = sum(p.numel() for p in stack.parameters)
    assert num_outside(model, stack) == sum(p.numel() for p in model.parameters()) - inside


def test_named() -> None:
    model = Holder(head=UNLIKE, layers=like(4))
    assert [len(find_stack(model, name)) for name in ("layers", "head")] == [4, 3]


@pytest.mark.parametrize("name", ["layer", "layers.0", ""])
def test_a_wrong_name_names_the_lists(name: str) -> None:
    with pytest.raises(HanayoError, match=r"is no ModuleList or Sequential of Holder; .*Known: .*layers"):
        find_stack(Holder(layers=like(2), head=nn.Linear(2, 2)), name)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Holder(layers=like(1)), Holder(head=UNLIKE)])
def test_no_stack(model: nn.Module) -> None:
    with pytest.raises(HanayoError, match="has no stack of blocks"):
        find_stack(model)


def test_one_module_twice() -> None:
    block = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"h\[1\] and h\[3\] are one module"):
        find_stack(Holder(h=nn.ModuleList([nn.Linear(2, 2), block, nn.Linear(2, 2), block])))


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_a_block(kind: str) -> None:
    layers = like(3)
    getattr(layers[1], kind)(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"h\[1\] has hooks"):
        find_stack(Holder(h=layers))


def test_what_transformers_leaves_on_a_model_that_ran_is_no_hook() -> None:
    model = models.gpt2()
    model.model(input_ids=torch.ones(1, 2, dtype=torch.long), output_hidden_states=True)
    assert model.model.transformer.h[0]._forward_hooks
    assert len(find_stack(model)) == 8
