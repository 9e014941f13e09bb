"""Finds the stack: the repeated blocks that the pipeline's stages are made of.

layers = ModuleList(block, block, ...)                  "layers"
layers = ModuleList(ModuleList(block, ...), ...)        "layers[*]"      all blocks of all lists, in order
net = Sequential(embedding, block, block, ..., head)    "net[1:9]"       the blocks among other modules
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from lightning_hanayo.errors import HanayoError, UnsupportedError, nearest

_TABLES = nn.Embedding | nn.EmbeddingBag
_LISTS = nn.ModuleList | nn.Sequential


@dataclass(frozen=True)
class Stack:
    """A list of blocks inside a model."""

    name: str
    """qualified name in the model, such as `transformer.h` in GPT-2"""
    blocks: tuple[nn.Module, ...]
    block_names: tuple[str, ...]
    """qualified names in the model"""

    @property
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules in the blocks, with their qualified names."""
        for index, block in enumerate(self.blocks):
            yield from block.named_modules(prefix=f"{self.name}[{index}]")

    def __len__(self) -> int:
        return len(self.blocks)

    def check_in(self, model: nn.Module) -> None:
        """Refuse a model that hasn't the same blocks under the same names."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for block, name in zip(self.blocks, self.block_names, strict=True):
            if modules.get(name) is not block:
                raise UnsupportedError(
                    f"the {type(block).__name__} that was {name} when training began was removed, replaced or renamed. "
                    f"The blocks of {self.name} are assigned to ranks: change the modules inside them, append blocks, "
                    f"or change the blocks before fit."
                )

    @property
    def uncompiled(self) -> "Stack":
        """The stack of the modules that `torch.compile` has made these blocks of."""
        return replace(self, blocks=tuple(map(original, self.blocks)))

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters of all blocks."""
        return {parameter for block in self.blocks for parameter in block.parameters()}


def find_stack(model: nn.Module, name: str | None = None) -> Stack:
    """The `ModuleList` or `Sequential` called `name`, whose blocks may differ.

    Without a name: the outermost list of two or more blocks of one class, or three or more of them in a row among
    other modules of a `Sequential`; of these the one that has the most parameters, a frozen one only if all are frozen.

    Raises:
        HanayoError: there is none, or the named module is no list of blocks.
        UnsupportedError: the stack contains one module twice, or lists, which no code calls.
    """
    lists = {known: module for known, module in model.named_modules() if isinstance(module, _LISTS)}
    found = [*_outermost_stacks(model, ""), *_rows(model)]
    if name is not None and name in lists:
        stack = _whole(lists[name], name)
    elif name is not None:
        named = [stack for stack in found if stack.name == name]
        if not named:
            hint = nearest(name, {*lists, *(stack.name for stack in found)})
            raise HanayoError(f"blocks={name!r} is no ModuleList or Sequential of {type(model).__name__}; {hint}")
        stack = named[0]
    elif found:
        stack = max(found, key=_size)
    else:
        raise HanayoError(
            f"{type(model).__name__} has no stack of blocks: no ModuleList or Sequential with two or more modules of "
            f"one class. Build its layers as such a list, or name one with HanayoStrategy(blocks='model.layers'). "
            f"If they are a list of lists, such as [attention, feed-forward], make a module with a forward of each."
        )
    _check(stack)
    return stack


def find_stack_if_any(model: nn.Module, name: str | None = None) -> Stack:
    """The stack; an empty one, if the model has none that a pipeline could cut. One rank needs none.

    Raises:
        HanayoError: it was named, and isn't there.
    """
    try:
        return find_stack(model, name)
    except HanayoError:
        if name is not None:
            raise
        return Stack("", (), ())


def original(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` was called with; the module itself if it isn't the result of that."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def modules_outside(model: nn.Module, stack: Stack) -> Sequence[nn.Module]:
    """The modules that are neither blocks nor inside one."""
    inside = {part for block in stack.blocks for part in block.modules()}
    return [module for module in model.modules() if module not in inside]


def num_parameters_outside(model: nn.Module, stack: Stack, *, computing: bool = False) -> int:
    """The number of parameter elements outside the stack.

    If `computing`, without tables that are looked up alone, which takes no time. Without another matrix outside the
    stack, a table is the head's weight, too.
    """
    inside = set(stack.parameters)
    if computing:
        modules = modules_outside(model, stack)
        tables = {p for module in modules if isinstance(module, _TABLES) for p in module.parameters(recurse=False)}
        others = {p for module in modules if not isinstance(module, _TABLES) for p in module.parameters(recurse=False)}
        if any(parameter.dim() > 1 for parameter in others):
            inside |= tables - others
    return sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)


def _modules(stack: Stack) -> set[nn.Module]:
    return {part for block in stack.blocks for part in block.modules()}


def _size(stack: Stack) -> tuple[bool, int]:
    """The number of parameters; less than that of any other stack if none is trained, as in a teacher."""
    parameters = stack.parameters
    return any(one.requires_grad for one in parameters), sum(one.numel() for one in parameters)


def _outermost_stacks(module: nn.Module, name: str) -> Iterator[Stack]:
    """The lists of blocks of one class in `module` that aren't inside another such list, or among blocks in a row."""
    stack = _whole(module, name)
    if len(stack) > 1 and len(set(map(type, stack.blocks))) == 1 and stack.parameters:
        yield stack
        return
    in_rows = {block for row in _rows_of(module, name) for block in row.blocks}
    for child_name, child in module.named_children():
        if child not in in_rows:
            yield from _outermost_stacks(child, _joined(name, child_name))


def _rows(model: nn.Module) -> Iterator[Stack]:
    """The blocks in a row in all Sequentials of `model`."""
    for name, module in model.named_modules():
        yield from _rows_of(module, name)


def _rows_of(module: nn.Module, name: str) -> Iterator[Stack]:
    """Three or more blocks of one class in a row in a Sequential, among other modules."""
    children = _children(module, name) if isinstance(module, nn.Sequential) else []
    start = 0
    for _, group in groupby(children, lambda child: type(child[1])):
        names, blocks = zip(*group, strict=True)
        stop = start + len(blocks)
        row = Stack(f"{name}[{start}:{stop}]", blocks, names)
        if 2 < len(blocks) < len(children) and row.parameters:
            yield row
        start = stop


def _whole(module: nn.Module, name: str) -> Stack:
    """All blocks of a list, and of the lists in it, if it holds nothing else; no blocks if it is no list."""
    named = _children(module, name) if isinstance(module, _LISTS) else []
    while named and all(isinstance(block, nn.ModuleList) for _, block in named):
        named = [child for path, block in named for child in _children(block, path)]
        name = f"{name.removesuffix('[*]')}[*]"
    return Stack(name, tuple(block for _, block in named), tuple(path for path, _ in named))


def _children(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The children with their qualified names; a module that is there twice is there twice."""
    return [(_joined(name, key), child) for key, child in module._modules.items() if child is not None]


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _check(stack: Stack) -> None:
    for name, block in zip(stack.block_names, stack.blocks, strict=True):
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise UnsupportedError(
                f"{name} is a {type(block).__name__}, which has no forward, but a pipeline runs each block of "
                f"{stack.name} by calling it. Make a module with a forward of it, or name another stack with "
                f"HanayoStrategy(blocks=...)."
            )
    for i, block in enumerate(stack.blocks):
        first = stack.blocks.index(block)
        if first < i:
            raise UnsupportedError(
                f"{stack.name}[{first}] and {stack.name}[{i}] are the same module, used twice; a pipeline can't place "
                f"it on two ranks. Use a separate module for each block, or name another stack with "
                f"HanayoStrategy(blocks=...)."
            )


_WORTH_SAYING = 0.05
"""a stack with a smaller share of the parameters in blocks costs little"""


@dataclass(frozen=True)
class UncutStack:
    """A stack that stays whole, while the pipeline cuts another one."""

    stack: Stack
    num_parameters: int
    share: float
    """of the parameters in the blocks of all stacks"""


def uncut_stacks(model: nn.Module, cut: Stack) -> list[UncutStack]:
    """The stacks that stay whole where `cut` is made into stages, the largest first; small ones are left out."""
    seen, others = _modules(cut), []
    for other in sorted([*_outermost_stacks(model, ""), *_rows(model)], key=_size, reverse=True):
        if seen.isdisjoint(_modules(other)):  # they have no module in common with `cut`, or with a larger one
            seen |= _modules(other)
            others.append(other)
    inside = {parameter for stack in (cut, *others) for parameter in stack.parameters}
    total = sum(parameter.numel() for parameter in inside)
    sizes = [sum(parameter.numel() for parameter in stack.parameters - cut.parameters) for stack in others]
    found = [UncutStack(stack, size, size / total) for stack, size in zip(others, sizes, strict=True)]
    return sorted((one for one in found if one.share >= _WORTH_SAYING), key=lambda one: -one.num_parameters)


def describe_uncut(model: nn.Module, cut: Stack, num_pipeline_ranks: int) -> str:
    """A message about the stacks that stay whole, with the way out; empty if there is none.

    Example:
        T5Model has 2 stacks of blocks, of which one is cut: decoder.block (6 blocks, 25.2 M parameters). Whole on
        pipeline rank 0: encoder.block (6 blocks, 18.9 M parameters, 43% of those in blocks). If each parameter costs
        the same computation, 4 pipeline ranks are at most 2.3 times as fast as one, since rank 0 computes all that is
        whole. HanayoStrategy(blocks='encoder.block') cuts that stack instead.
    """
    uncut = uncut_stacks(model, cut)
    if not uncut:
        return ""
    size = sum(parameter.numel() for parameter in cut.parameters)
    described, share, are_trained = [], sum(one.share for one in uncut), True
    for one in uncut:
        trained = [p.requires_grad for p in one.stack.parameters]
        are_trained &= all(trained)
        described.append(
            f"{one.stack.name} ({len(one.stack)} blocks, {_count(one.num_parameters)} parameters, "
            f"{one.share:.0%} of those in blocks{'' if any(trained) else ', frozen'})"
        )
    limit = ""
    if are_trained and share * num_pipeline_ranks > 1:
        limit = (
            f" If each parameter costs the same computation, {num_pipeline_ranks} pipeline ranks are at most "
            f"{1 / share:.1f} times as fast as one, since rank 0 computes all that is whole."
        )
    return (
        f"{type(model).__name__} has {1 + len(uncut)} stacks of blocks, of which one is cut: {cut.name} "
        f"({len(cut)} blocks, {_count(size)} parameters). Whole on pipeline rank 0: {', '.join(described)}."
        f"{limit} HanayoStrategy(blocks={uncut[0].stack.name!r}) cuts that stack instead."
    )


def _count(number: int) -> str:
    """A number of parameters, in a unit that suits it: 34.6 M."""
    for factor, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return str(number)
