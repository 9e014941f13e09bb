"""The stack is the outermost list of blocks of one class that has the most parameters.

model.layers.0 .. 7            found
model.layers.0.experts.0 .. 3  inside another list: never
classifier (different layers)  blocks of several classes: only if named
net.1 .. 3 of net.0 .. 5       blocks in a row in a Sequential, if no list has more parameters
"""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.partition.stack import find_stack, find_stack_if_any, num_parameters_outside
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


def linears(count: int, width: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


DIFFERENT = nn.Sequential(nn.Linear(99, 99), nn.ReLU(), nn.Linear(99, 99))
FOUND: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "the larger list": (lambda: Holder(encoder=linears(3), decoder=linears(3, 5)), "decoder", 3),
    "the most parameters": (lambda: Holder(long=linears(9, 2), wide=linears(2, 50)), "wide", 2),
    "nested": (lambda: Holder(model=Holder(inner=Holder(layers=linears(4)))), "model.inner.layers", 4),
    "experts inside blocks": (lambda: Holder(layers=nn.ModuleList(Expert() for _ in range(2))), "layers", 2),
    "blocks that are lists": (
        lambda: Holder(h=nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))), "h", 3,
    ),
    "a Sequential": (lambda: Holder(body=nn.Sequential(*linears(3))), "body", 3),
    "a list of different layers is skipped": (lambda: Holder(head=DIFFERENT, layers=linears(2)), "layers", 2),
    "a list without parameters is skipped": (
        lambda: Holder(acts=nn.ModuleList(nn.ReLU() for _ in range(20)), layers=linears(2)), "layers", 2,
    ),
    "stages of an unlike list": (
        lambda: nn.Sequential(nn.Flatten(), Holder(layers=linears(2)), nn.Linear(2, 2)), "1.layers", 2,
    ),
    "gpt2": (models.gpt2, "model.transformer.h", 8),
    "llama": (models.llama, "model.model.layers", 8),
    "bert": (models.bert, "model.bert.encoder.layer", 8),
    "the GPT recipe": (models.gpt, "blocks", 8),
    "nn.TransformerEncoder": (
        lambda: Holder(enc=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)),
        "enc.layers", 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOUND)
def test_stack_is_found(kind: str) -> None:
    factory, name, count = FOUND[kind]
    model = factory()
    stack = find_stack(model)
    assert (stack.name, len(stack)) == (name, count)
    assert stack.blocks == tuple(model.get_submodule(name))
    inside = sum(p.numel() for p in stack.parameters)
    assert num_parameters_outside(model, stack) == sum(p.numel() for p in model.parameters()) - inside


class Block(nn.Module):
    """Has a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = linears(2)


def blocks_in_a_row(count: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(count)), nn.LayerNorm(4))


def levels(*counts: int) -> nn.ModuleList:
    return nn.ModuleList(linears(count) for count in counts)


@pytest.mark.parametrize(
    ("model", "name", "block_names"),
    [
        (Holder(net=blocks_in_a_row(3)), "net[1:4]", ["net.1", "net.2", "net.3"]),
        (blocks_in_a_row(3), "[1:4]", ["1", "2", "3"]),
        (Holder(net=blocks_in_a_row(3), heads=linears(2)), "net[1:4]", ["net.1", "net.2", "net.3"]),
        (Holder(net=blocks_in_a_row(3), layers=linears(99)), "layers", [f"layers.{i}" for i in range(99)]),
        (Holder(net=blocks_in_a_row(2)), "net.1.parts", ["net.1.parts.0", "net.1.parts.1"]),
        (Holder(net=levels(1, 2)), "net[*]", ["net.0.0", "net.1.0", "net.1.1"]),
        (Holder(net=nn.ModuleList([levels(1, 1), levels(1)])), "net[*]", ["net.0.0.0", "net.0.1.0", "net.1.0.0"]),
    ],
)
def test_blocks_in_a_row_and_in_lists_of_lists(model: nn.Module, name: str, block_names: list[str]) -> None:
    for stack in (find_stack(model), find_stack(model, name)):
        assert (stack.name, list(stack.block_names)) == (name, block_names)
        assert stack.blocks == tuple(map(model.get_submodule, block_names))


def test_a_frozen_teacher_is_no_stack() -> None:
    model = Holder(teacher=linears(9).requires_grad_(False), student=linears(2))
    assert find_stack(model).name == "student"
    assert find_stack(model.requires_grad_(False)).name == "teacher"


def test_lists_without_a_forward_are_refused() -> None:
    mixed = nn.ModuleList([linears(2), nn.Linear(4, 4)])
    with pytest.raises(
        UnsupportedError, match=r"h.0 is a ModuleList, which has no forward.*Make a module with a forward"
    ):
        find_stack(Holder(h=mixed), "h")


def test_rows_of_lists_and_layers_are_a_stack_by_the_name_that_errors_say() -> None:
    """As in x-transformers: [[norm], layer, norm] for each layer."""
    rows = nn.ModuleList(nn.ModuleList([nn.ModuleList([nn.LayerNorm(4)]), layer]) for layer in DIFFERENT)
    with pytest.raises(HanayoError, match=r"name it: HanayoStrategy\(blocks='rows\[\*\]'\)"):
        find_stack(Holder(rows=rows))
    for name in ("rows", "rows[*]"):
        assert find_stack(Holder(rows=rows), name).block_names[:3] == ("rows.0.0.0", "rows.0.1", "rows.1.0.0")


def test_the_modules_of_sequentials_are_blocks_if_they_are_named() -> None:
    """As in scvi-tools, whose step calls them one by one, with other code in between."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    names = ["net", "net[*]"]
    assert [len(find_stack(Holder(net=layers), name)) for name in names] == [2, 4]
    assert find_stack(Holder(net=layers), "net[*]").block_names == ("net.0.0", "net.0.1", "net.1.0", "net.1.1")


def test_modules_that_are_in_no_list_are_blocks_in_the_order_of_their_names() -> None:
    model = Holder(a=nn.Linear(4, 4), b=nn.Sequential(*linears(2)), c=nn.ModuleDict({"only": nn.Linear(4, 4)}))
    assert find_stack(model, "b+a").block_names == ("b", "a")
    assert find_stack(model, "a+b[*]").block_names == ("a", "b.0", "b.1")
    with pytest.raises(HanayoError, match=r"^blocks: 'd' is no module of Holder; "):
        find_stack(model, "a+d")
    with pytest.raises(HanayoError, match=r"^blocks: 'a' is no ModuleList or Sequential of Holder; "):
        find_stack(model, "b+a[*]")
    with pytest.raises(UnsupportedError, match="c is a ModuleDict, which has no forward"):
        find_stack(model, "a+c")


def test_a_dictionary_with_a_forward_is_a_block() -> None:
    """As the dense blocks of a DenseNet."""

    class Dense(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert len(find_stack(Holder(h=nn.Sequential(Dense({"a": nn.Linear(2, 2)}), nn.Linear(2, 2))), "h")) == 2


def test_stack_by_name() -> None:
    model = Holder(head=DIFFERENT, layers=linears(4))
    assert [len(find_stack(model, name)) for name in ("layers", "head")] == [4, 3]


@pytest.mark.parametrize("name", ["layer", "layers.0", ""])
def test_error_for_a_wrong_name_lists_the_candidates(name: str) -> None:
    with pytest.raises(HanayoError, match=r"is no ModuleList or Sequential of Holder; .*Known: .*layers"):
        find_stack(Holder(layers=linears(2), head=nn.Linear(2, 2)), name)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Holder(layers=linears(1)), Holder(head=DIFFERENT)])
def test_model_without_a_stack_is_refused(model: nn.Module) -> None:
    with pytest.raises(HanayoError, match="has no stack of blocks"):
        find_stack(model)


def test_one_module_used_twice_is_refused() -> None:
    block = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"h\[1\] and h\[3\] are the same module"):
        find_stack(Holder(h=nn.ModuleList([nn.Linear(2, 2), block, nn.Linear(2, 2), block])))


def test_one_rank_needs_no_stack_unless_it_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert len(find_stack_if_any(model)) == 0
    with pytest.raises(HanayoError, match="blocks='layers' is no ModuleList"):
        find_stack_if_any(model, "layers")
