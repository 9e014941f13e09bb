"""A step's calls tell which list is the stack: one whose blocks it passes through, each on the output of the last.

tower.0 .. 3     never called: no stack, however large it is
layers.0 .. 7    called in order, on each other's output: the stack, also if its classes differ
layers.0.heads   called in order, all on the same input: never
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partition.stack import Calls, find_stack, is_ambiguous, other_lists, passed_stacks

WIDTH = 4


class Block(nn.Module):
    """x + layer(x)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layer(x)
        return out


class Special(Block):
    """A subclass."""


class Heads(nn.Module):
    """Its list is called in order, but not as a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([head(x) for head in self.heads]).sum(0)


class Encoder(nn.Module):
    """A list of blocks, in a module."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = blocks(count)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """Calls its children `named` one after another, and the modules of lists likewise."""

    def __init__(self, named: Sequence[str], **children: nn.Module) -> None:
        super().__init__()
        self.named = named
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.named:
            child = self.get_submodule(name)
            for module in child if isinstance(child, nn.ModuleList) else [child]:
                x = module(x)
        return x


class Parallel(Model):
    """Calls the modules of a list on the same input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([module(x) for module in self.get_submodule("towers")]).sum(0)


class Drops(Model):
    """Leaves a block out, as layer drop does."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.get_submodule("layers")):
            x = x if i == 1 else layer(x)
        return x


class Alternates(Model):
    """Leaves out the blocks of one class, as those of cross-attention to images in a text."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.get_submodule("layers"):
            x = x if type(layer) is Heads else layer(x)
        return x


def blocks(count: int, kinds: Sequence[Callable[[], nn.Module]] = (Block,)) -> nn.ModuleList:
    return nn.ModuleList(kinds[i % len(kinds)]() for i in range(count))


def named_by_calls(model: nn.Module) -> str:
    calls = Calls(model)
    with calls.recording():
        model(torch.ones(2, WIDTH))
    return find_stack(model, calls=calls).name


WIDE = partial(Block, 64)
MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "mixed classes": (lambda: Model(["layers"], layers=blocks(8, [Block, Block, Heads])), "layers.2.heads", "layers"),
    "a subclass among seven": (
        lambda: Model(["layers"], layers=nn.ModuleList([*blocks(7), Special()]), tower=blocks(2)), "tower", "layers",
    ),
    "a larger tower that isn't called": (
        lambda: Model(["layers"], tower=blocks(3, [partial(Block, 16)]), layers=blocks(3)), "tower", "layers",
    ),
    "encoder and decoder: the heavier one": (
        lambda: Model(["encoder", "decoder"], encoder=Encoder(4), decoder=Encoder(3)), "encoder.layers",
        "encoder.layers",
    ),
    "a list in a block of a tower's list": (
        lambda: Model(["layers"], tower=blocks(5, [Heads]), layers=blocks(3)), "tower", "layers",
    ),
    "towers called on the same input": (
        lambda: Parallel([], towers=nn.ModuleList([Encoder(2), Block(), Encoder(3), Block()])), "towers.2.layers",
        "towers.2.layers",
    ),
    "layer drop": (lambda: Drops([], tower=blocks(5), layers=blocks(4)), "tower", "layers"),
    "one list of few classes": (
        lambda: Model(["layers"], layers=blocks(4, [Block, Special])), "layers", "layers",
    ),
    "blocks of one class are left out": (
        lambda: Alternates([], tower=blocks(5), layers=blocks(6, [Block, Heads])), "tower", "layers[0,2,4]",
    ),
    "two passes": (lambda: Model(["layers", "layers"], tower=blocks(5), layers=blocks(4)), "tower", "layers"),
    "nothing is passed through": (lambda: Model([], tower=blocks(5), layers=blocks(4)), "tower", "tower"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_the_stack_is_what_is_called(kind: str) -> None:
    factory, static, expected = MODELS[kind]
    model = factory()
    assert find_stack(model).name == static
    assert is_ambiguous(model)
    assert named_by_calls(model) == expected == find_stack(model, expected).name


def test_some_blocks_of_a_list_are_named_by_numbers_that_it_has() -> None:
    with pytest.raises(HanayoError, match=r"layers\[0,4\].*layers has 4 modules"):
        find_stack(Model([], layers=blocks(4)), "layers[0,4]")


UNIQUE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one list": (lambda: Model(["layers"], layers=blocks(4)), "layers"),
    "lists in its blocks": (lambda: Model(["layers"], layers=blocks(4, [Heads])), "layers"),
    "blocks in a row": (
        lambda: Model(["net"], net=nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks(4), nn.LayerNorm(WIDTH))), "net[1:5]",
    ),
    "a module with most of a list": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Encoder(), nn.Linear(WIDTH, WIDTH), Block()), "1.layers",
    ),
    "a frozen list": (lambda: Model(["layers"], tower=blocks(9).requires_grad_(False), layers=blocks(2)), "layers"),
    "a small list": (lambda: Model(["layers"], layers=blocks(3, [WIDE]), heads=blocks(2)), "layers"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNIQUE)
def test_most_models_need_no_calls_and_none_changes_them(kind: str) -> None:
    factory, expected = UNIQUE[kind]
    model = factory()
    assert not is_ambiguous(model)
    assert find_stack(model).name == expected
    if kind != "a small list":
        assert named_by_calls(model) == expected


def test_a_heavier_list_of_several_classes_is_taken_if_it_is_passed_through() -> None:
    model = Model(["layers", "head"], layers=blocks(4, [WIDE, Special]), head=blocks(2))
    assert find_stack(model).name == "head"
    model.layers = blocks(6, [Block, Special, Special])
    assert find_stack(model).name == "head"
    assert named_by_calls(model) == "layers"


def test_all_stacks_that_are_passed_through() -> None:
    model = Model(["encoder", "decoder"], tower=blocks(9), encoder=Encoder(), decoder=Encoder())
    calls = Calls(model)
    with calls.recording():
        model(torch.ones(1, WIDTH))
    assert [one.name for one in passed_stacks(model, calls)] == ["encoder.layers", "decoder.layers"]


def test_an_error_names_the_lists_with_a_way_out() -> None:
    model = Model(["net"], net=nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9)))
    said = (
        r"Model has lists: net \(3 blocks: Linear, ReLU\)\. If its step calls the modules of one in order, name it: "
        r"HanayoStrategy\(blocks='net'\)"
    )
    with pytest.raises(HanayoError, match=said):
        find_stack(model)
    assert find_stack(model, "net").name == "net"


def test_other_lists_are_those_outside_the_stack() -> None:
    model = Model([], tower=blocks(5, [Heads]), layers=blocks(4))
    assert other_lists(model, find_stack(model)) == (
        " Model has other lists: layers (4 blocks: Block). If its step calls the modules of one in order, name it: "
        "HanayoStrategy(blocks='layers')."
    )


def test_longer_lists_may_be_inside_the_stack() -> None:
    model = Model([], layers=nn.ModuleList([Encoder(1), Encoder(6)]), tower=blocks(3))
    stack = find_stack(model)
    assert stack.name == "layers"
    assert "lists: layers.1.layers (6 blocks: Block), tower (3" in other_lists(model, stack, longer=True)
    assert "lists: tower (3 blocks: Block). If" in other_lists(model, stack)
    assert not other_lists(model, find_stack(model, "layers.1.layers"), longer=True)
