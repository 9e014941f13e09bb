"""Finds the stack: the list of repeated blocks that the pipeline's stages are made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_hanayo.errors import HanayoError, UnsupportedError, nearest

_LISTS = nn.ModuleList | nn.Sequential


@dataclass(frozen=True)
class Stack:
    """A list of blocks inside a model."""

    name: str
    """qualified name in the model, such as `transformer.h` in GPT-2"""
    blocks: tuple[nn.Module, ...]

    @property
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules in the blocks, with their qualified names."""
        for index, block in enumerate(self.blocks):
            yield from block.named_modules(prefix=f"{self.name}[{index}]")

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters of all blocks."""
        return {parameter for block in self.blocks for parameter in block.parameters()}


def find_stack(model: nn.Module, name: str | None = None) -> Stack:
    """The `ModuleList` or `Sequential` called `name`, whose blocks may differ.

    Without a name: the outermost list of two or more blocks of one class that has the most parameters.

    Raises:
        HanayoError: there is none, or the named module is no list of blocks.
        UnsupportedError: the stack contains one module twice.
    """
    stack = _named_stack(model, name) if name is not None else _largest_stack(model)
    _check(stack)
    return stack


def modules_outside(model: nn.Module, stack: Stack) -> Sequence[nn.Module]:
    """The modules that are neither blocks nor inside one."""
    inside = {part for block in stack.blocks for part in block.modules()}
    return [module for module in model.modules() if module not in inside]


def num_parameters_outside(model: nn.Module, stack: Stack) -> int:
    """The number of parameter elements outside the stack."""
    inside = stack.parameters
    return sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)


def _named_stack(model: nn.Module, name: str) -> Stack:
    lists = {known: module for known, module in model.named_modules() if isinstance(module, _LISTS)}
    if name not in lists:
        hint = nearest(name, lists)
        raise HanayoError(f"blocks={name!r} is no ModuleList or Sequential of {type(model).__name__}; {hint}")
    return Stack(name, tuple(lists[name]))


def _largest_stack(model: nn.Module) -> Stack:
    candidates = list(_outermost_stacks(model, ""))
    if not candidates:
        raise HanayoError(
            f"{type(model).__name__} has no stack of blocks: no ModuleList or Sequential with two or more modules of "
            f"one class. Build its layers as such a list, or name one with HanayoStrategy(blocks='model.layers')."
        )
    return max(candidates, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters))


def _outermost_stacks(module: nn.Module, name: str) -> Iterator[Stack]:
    """The lists of blocks of one class in `module` that aren't inside another such list."""
    children = list(module) if isinstance(module, _LISTS) else []
    stack = Stack(name, tuple(children))
    if len(children) > 1 and len({type(child) for child in children}) == 1 and stack.parameters:
        yield stack
        return
    for child_name, child in module.named_children():
        yield from _outermost_stacks(child, f"{name}.{child_name}" if name else child_name)


def _check(stack: Stack) -> None:
    for i, block in enumerate(stack.blocks):
        first = stack.blocks.index(block)
        if first < i:
            raise UnsupportedError(
                f"{stack.name}[{first}] and {stack.name}[{i}] are the same module, used twice; a pipeline can't place "
                f"it on two ranks. Use a separate module for each block, or name another stack with "
                f"HanayoStrategy(blocks=...)."
            )
