"""The stack: the list of like blocks in a model that the pipeline is made of."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lightning_hanayo.errors import HanayoError, UnsupportedError, nearest


@dataclass(frozen=True)
class Stack:
    """A list of blocks inside a model.

    Example:
        >>> find_stack(GPT2LMHeadModel(config)).name
        'transformer.h'
    """

    name: str
    """qualified name in the model"""
    blocks: tuple[nn.Module, ...]

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Those of all blocks."""
        return {parameter for block in self.blocks for parameter in block.parameters()}


def find_stack(model: nn.Module, name: str | None = None) -> Stack:
    """The stack called `name`; without a name, the outermost list of like blocks that holds the most parameters.

    Args:
        model: a module with at least one `ModuleList` or `Sequential` of at least two blocks of one class.
        name: qualified name of any `ModuleList` or `Sequential`, whose blocks may differ.

    Raises:
        HanayoError: there is none, or the named module is no list of blocks.
        UnsupportedError: one module stands in the stack twice, or a block has hooks.
    """
    stack = _named(model, name) if name is not None else _largest(model)
    _check(stack)
    return stack


def _named(model: nn.Module, name: str) -> Stack:
    lists = {
        known: module for known, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    if name not in lists:
        raise HanayoError(
            f"blocks={name!r} is no ModuleList or Sequential of {type(model).__name__}; {nearest(name, lists)}"
        )
    return Stack(name, tuple(lists[name]))


def _largest(model: nn.Module) -> Stack:
    candidates = list(_outermost(model, ""))
    if not candidates:
        raise HanayoError(
            f"{type(model).__name__} has no stack of blocks: no ModuleList or Sequential with two or more modules of "
            f"one class. Build its layers as such a list, or name one with HanayoStrategy(blocks='model.layers')."
        )
    return max(candidates, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters))


def _outermost(module: nn.Module, name: str) -> Iterator[Stack]:
    """The lists of like blocks in `module` that don't lie inside another one."""
    children = list(module) if isinstance(module, nn.ModuleList | nn.Sequential) else []
    if len(children) > 1 and len({type(child) for child in children}) == 1 and _has_parameters(children):
        yield Stack(name, tuple(children))
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name)


def _has_parameters(modules: list[nn.Module]) -> bool:
    return any(list(module.parameters()) for module in modules)


def _check(stack: Stack) -> None:
    for i, block in enumerate(stack.blocks):
        first = stack.blocks.index(block)
        if first < i:
            raise UnsupportedError(
                f"{stack.name}[{first}] and {stack.name}[{i}] are one module, used twice; a pipeline can't place it on "
                f"two ranks. Give each block its own module, or name another stack with HanayoStrategy(blocks=...)."
            )
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(not _is_idle(hook) for kind in kinds for hook in getattr(block, kind).values()):
            raise UnsupportedError(
                f"{stack.name}[{i}] has hooks; on other pipeline ranks they would never run. Remove them, or put what "
                f"they do into the block's forward."
            )


def _is_idle(hook: object) -> bool:
    """Transformers leaves these on a model once asked for its hidden states; without a request they do nothing."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def num_outside(model: nn.Module, stack: Stack) -> int:
    """How many numbers the parameters outside the stack hold."""
    inside = stack.parameters
    return sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)
