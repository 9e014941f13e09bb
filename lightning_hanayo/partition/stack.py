"""Finds the stack: the repeated blocks that the pipeline's stages are made of.

layers = ModuleList(block, block, ...)                  "layers"
layers = ModuleList(ModuleList(block, ...), ...)        "layers[*]"      all blocks of all lists, in order
layers = ModuleList(Sequential(linear, relu), ...)      "layers[*]"      their modules, but only if it is named so
net = Sequential(embedding, block, block, ..., head)    "net[1:9]"       the blocks among other modules
layers = ModuleList(block, other, block, ...)           "layers[0,2]"    some of them: those that the step calls
two ModuleLists of as many modules                      "a+b"            a[0], b[0], a[1], b[1], ...: lists in turn
modules without a list                                  "s1+s2+s3[*]"    s1, s2, and the modules of s3, a Sequential
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from operator import ge
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hanayo.errors import HanayoError, UnsupportedError, listed, nearest

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

    def __str__(self) -> str:
        return f"{self.name} ({len(self)} blocks: {listed(dict.fromkeys(one.__name__ for one in self._classes), 4)})"

    @property
    def _classes(self) -> dict[type[nn.Module], None]:
        return dict.fromkeys(map(type, self.blocks))

    @property
    def is_uniform(self) -> bool:
        """Whether all blocks are of one class."""
        return len(self._classes) == 1

    @property
    def may_be_cut(self) -> bool:
        """Whether they look like blocks: several, with parameters, of one class or of few that repeat."""
        if len(self) < 2 or self.is_uniform:
            return len(self) > 1 and any(map(_has_parameters, self.blocks))
        return 2 * len(self._classes) <= len(self) and all(
            _has_parameters(block) and not _has_no_forward(block) for block in self.blocks
        )

    def check_in(self, model: nn.Module) -> None:
        """Refuse a model that hasn't the same blocks under the same names."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for block, name in zip(self.blocks, self.block_names, strict=True):
            if modules.get(name) is not block:
                raise UnsupportedError(
                    f"the {type(block).__name__} that was {name} when training began was removed, replaced or renamed. "
                    f"Change the modules inside the blocks of {self.name}, append blocks, or change them before fit."
                )

    @property
    def uncompiled(self) -> "Stack":
        """The stack of the modules that `torch.compile` has made these blocks of."""
        return replace(self, blocks=tuple(map(original, self.blocks)))

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters of all blocks."""
        return {parameter for block in self.blocks for parameter in block.parameters()}


class Calls:
    """The calls that a step makes of the modules in a model's lists: in which order, and what they hand on."""

    def __init__(self, model: nn.Module) -> None:
        self._watched = {
            child for module in model.modules() if isinstance(module, _LISTS) for child in module.children()
        }
        self._calls: list[tuple[nn.Module, dict[int, Any], dict[int, Any]]] = []
        """modules, and their arguments and outputs by `id`: kept, so that no other object gets the same number"""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """In this context the step runs."""

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._calls.append((module, _objects((args, kwargs)), _objects(output)))

        with ExitStack() as hooks:
            for module in self._watched:
                hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            yield

    def called(self, stack: Stack) -> Stack:
        """The stack without classes of blocks that aren't called, such as cross-attention to images in a text."""
        kinds = {type(module) for module, _, _ in self._calls if module in stack.blocks}
        if len(kinds) in (0, len(stack._classes)) or stack.name.endswith("]"):
            return stack
        return _some(stack, [i for i, block in enumerate(stack.blocks) if type(block) in kinds])

    def pass_through(self, stack: Stack) -> bool:
        """Whether the blocks are called in order, each on what becomes of the output of the one before, once or often.

        Blocks of one class may be left out, as by layer drop, which draws others in each step.
        """
        index = {block: i for i, block in enumerate(stack.blocks)}
        own = [(index[module], given, made) for module, given, made in self._calls if module in index]
        num_called = len({number for number, _, _ in own})
        if num_called < (2 if stack.is_uniform else len(stack)):
            return False
        return all(
            now == own[0][0] if now <= before else not made.keys().isdisjoint(given) or _derives(given, made)
            for (before, _, made), (now, given, _) in pairwise(own)
        )


def _objects(value: Any) -> dict[int, Any]:
    return {id(leaf): leaf for leaf in tree_leaves(value) if not isinstance(leaf, bool | int | float | str | None)}


def _derives(given: Mapping[int, Any], made: Mapping[int, Any]) -> bool:
    """Whether one of the given tensors was computed from one of those that were made, by autograd's graph."""
    wanted, waiting = (
        [one.grad_fn for one in some.values() if isinstance(one, Tensor) and one.grad_fn is not None]
        for some in (made, given)
    )
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in wanted:
            return True
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        waiting += new
    return False


def find_stack(model: nn.Module, name: str | None = None, calls: Calls | None = None) -> Stack:
    """The `ModuleList` or `Sequential` called `name`, whose blocks may differ; with "+", of several modules.

    Without a name: the outermost list of two or more blocks of one class, or three or more of them in a row among
    other modules of a `Sequential`; of these the one that has the most parameters, a frozen one only if all are frozen.
    If there is none, a list of few classes that repeat. With the `calls` of a step only what they pass through counts,
    and a list of several classes counts if it has more parameters than those of one class.

    Raises:
        HanayoError: there is none, or the named module is no list of blocks.
        UnsupportedError: the stack contains one module twice, or lists, which no code calls.
    """
    lists = {known: module for known, module in model.named_modules() if isinstance(module, _LISTS)}
    if name is not None and "+" in name:
        stack = _of_several(model, name, lists)
    elif name is not None and (some := re.fullmatch(r"(.*)\[(\d+(?:,\d+)*)\]", name)) and some[1] in lists:
        numbers, whole = list(map(int, some[2].split(","))), _whole(lists[some[1]], some[1])
        if max(numbers) >= len(whole):
            raise HanayoError(f"blocks={name!r}: {some[1]} has {len(whole)} modules")
        stack = _some(whole, numbers)
    elif name is not None and (of := name.removesuffix("[*]")) in lists:
        stack = _whole(lists[of], of)
        if name != of and name != stack.name:  # of Sequentials, whose modules the step calls
            inner = list(chain.from_iterable(map(_children, stack.blocks, stack.block_names)))
            stack = Stack(name, tuple(one for _, one in inner), tuple(path for path, _ in inner))
    elif name is not None:
        found = _stacks(model)
        named = [stack for stack in found if stack.name == name]
        if not named:
            hint = nearest(name, {*lists, *(stack.name for stack in found)})
            raise HanayoError(f"blocks={name!r} is no ModuleList or Sequential of {type(model).__name__}; {hint}")
        stack = named[0]
    elif best := _best([] if calls is None else passed_stacks(model, calls), is_passed=True) or _best(_stacks(model)):
        stack = best
    else:
        raise HanayoError(
            f"{type(model).__name__} has no stack of blocks: no list of modules of one class, or of few that repeat."
            f"{other_lists(model)} Else name modules that its step calls in turn: blocks=['first', 'second', ...]."
        )
    _check(stack)
    return stack


def other_lists(model: nn.Module, stack: Stack | None = None, *, longer: bool = False) -> str:
    """Sentences that name the lists of the model outside the stack, for errors; empty if there is none.

    `longer`: those that have more blocks than the stack, also inside it.

    Example:
         VGG has lists: features (31 blocks: Conv2d, ReLU, MaxPool2d), classifier (7 blocks: Linear, ReLU, Dropout). If
        its step calls the modules of one in order, name it: HanayoStrategy(blocks='features').
    """
    known = [_whole(module, name) for name, module in model.named_modules() if isinstance(module, _LISTS)]
    inside = set() if stack is None or longer else _modules(stack)
    least = len(stack) + 1 if stack is not None and longer else 2
    others = [one for one in (*known, *_stacks(model)) if len(one) >= least and inside.isdisjoint(one.blocks)]
    if not others:
        return ""
    others = sorted({one.name: one for one in others}.values(), key=_size, reverse=True)
    return (
        f" {type(model).__name__} has {'' if stack is None else 'other '}lists: {listed(map(str, others), 6)}. If its "
        f"step calls the modules of one in order, name it: HanayoStrategy(blocks={others[0].name!r})."
    )


def is_ambiguous(model: nn.Module) -> bool:
    """Whether it depends on a step's calls which of the model's lists is cut. Small ones don't count."""
    found = _stacks(model)
    best = _best(found)
    if best is None or not best.is_uniform:
        return best is not None  # it may leave out a class
    is_trained, _ = _size(best)
    enough = _MAY_BE_ALL * sum(parameter.numel() for parameter in model.parameters())
    sizes = [_size(one) for one in _outermost(found) if one is not best]
    return any(trained >= is_trained and size >= enough for trained, size in sizes)


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
    inside = _modules(stack)
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


def passed_stacks(model: nn.Module, calls: Calls) -> list[Stack]:
    """The outermost stacks that the calls pass through."""
    return _outermost([one for one in map(calls.called, _stacks(model)) if calls.pass_through(one)])


def _best(found: Sequence[Stack], *, is_passed: bool = False) -> Stack | None:
    """The largest stack of one class; if a step passes through them, a heavier one of several classes."""
    mixed = max((one for one in found if not one.is_uniform), key=_size, default=None)
    best = max((one for one in found if one.is_uniform), key=_size, default=mixed)
    is_heavier = mixed is not None and best is not None and all(map(ge, _size(mixed), _size(best)))
    return mixed if is_passed and is_heavier else best


def _stacks(model: nn.Module) -> list[Stack]:
    """All that may be cut: lists, also those inside blocks of others, and blocks in a row in a Sequential."""
    found: list[Stack] = []
    for name, module in model.named_modules():
        found += [stack for stack in (_whole(module, name), *_rows_of(module, name)) if stack.may_be_cut]
    return found


def _outermost(found: Sequence[Stack]) -> list[Stack]:
    """The stacks that aren't inside a block of another one.

    Of a list of several classes, one inside that holds most of its parameters is the stack, or blocks in a row.
    """
    modules = {one: _modules(one) for one in found}

    def is_better(inner: Stack, outer: Stack) -> bool:
        is_row = inner.blocks[0] in outer.blocks
        return (
            inner is not outer
            and inner.blocks[0] in modules[outer]
            and (is_row or 2 * _size(inner)[1] > _size(outer)[1])
        )

    kept = [one for one in found if one.is_uniform or not any(is_better(other, one) for other in found)]
    return [one for one in kept if not any(one is not other and one.blocks[0] in modules[other] for other in kept)]


def _rows_of(module: nn.Module, name: str) -> Iterator[Stack]:
    """Three or more blocks of one class in a row in a Sequential, among other modules."""
    children = _children(module, name) if isinstance(module, nn.Sequential) else []
    start = 0
    for _, group in groupby(children, lambda child: type(child[1])):
        names, blocks = zip(*group, strict=True)
        stop = start + len(blocks)
        if 2 < len(blocks) < len(children):
            yield Stack(f"{name}[{start}:{stop}]", blocks, names)
        start = stop


def _whole(module: nn.Module, name: str) -> Stack:
    """All blocks of a list, or of the lists of which it consists, on any level; no blocks if it is no list."""
    named = _children(module, name) if isinstance(module, _LISTS) else []
    holds_lists = all(isinstance(block, nn.ModuleList) for _, block in named)
    while holds_lists and any(isinstance(block, nn.ModuleList) for _, block in named):
        parts = [_children(*one[::-1]) if isinstance(one[1], nn.ModuleList) else [one] for one in named]
        named, name = list(chain.from_iterable(parts)), f"{name.removesuffix('[*]')}[*]"
    return Stack(name, tuple(block for _, block in named), tuple(path for path, _ in named))


def _some(stack: Stack, numbers: Sequence[int]) -> Stack:
    """The blocks with these numbers."""
    name, paths = f"{stack.name}[{','.join(map(str, numbers))}]", stack.block_names
    return Stack(name, tuple(stack.blocks[i] for i in numbers), tuple(paths[i] for i in numbers))


def _of_several(model: nn.Module, name: str, lists: Mapping[str, nn.Module]) -> Stack:
    """The modules called so, in this order; with "[*]" a Sequential stands for its modules.

    If there is a ModuleList among them, all are lists: first come the modules at the first position of each, then those
    at the second, and so on. A list at such a position counts as its modules.
    """
    modules, rows = dict(model.named_modules()), []
    in_turn = any(isinstance(modules.get(one), nn.ModuleList) for one in name.split("+"))
    for one in name.split("+"):
        path = one.removesuffix("[*]")
        is_list = in_turn or path != one
        if path not in (known := lists if is_list else modules):
            what, hint = "ModuleList or Sequential" if is_list else "module", nearest(path, set(known))
            raise HanayoError(f"blocks: {path!r} is no {what} of {type(model).__name__}; {hint}")
        rows.append(_children(known[path], path) if is_list else [(path, known[path])])
    if in_turn and len(sizes := {len(row) for row in rows}) > 1:
        raise HanayoError(f"blocks: the lists {name} have {sorted(sizes)} modules, but one of each makes a block")
    pending = [child for position in (zip(*rows, strict=True) if in_turn else rows) for child in position]
    named: list[tuple[str, nn.Module]] = []
    while pending:
        path, block = pending.pop(0)
        if isinstance(block, nn.ModuleList):
            pending[:0] = _children(block, path)
        else:
            named.append((path, block))
    return Stack(name, tuple(block for _, block in named), tuple(path for path, _ in named))


def _children(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The children with their qualified names; a module that is there twice is there twice."""
    return [(f"{name}.{key}".removeprefix("."), child) for key, child in module._modules.items() if child is not None]


def _has_parameters(block: nn.Module) -> bool:
    return any(True for _ in block.parameters())


def _has_no_forward(module: nn.Module) -> bool:
    """Whether it only holds others, as a ModuleList; but a DenseNet's block is a ModuleDict with a forward."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _check(stack: Stack) -> None:
    for name, block in zip(stack.block_names, stack.blocks, strict=True):
        if _has_no_forward(block):
            raise UnsupportedError(
                f"{name} is a {type(block).__name__}, which has no forward to run a block of {stack.name} by. Make a "
                f"module with a forward of it, or name another stack with HanayoStrategy(blocks=...)."
            )
    for i, block in enumerate(stack.blocks):
        first = stack.blocks.index(block)
        if first < i:
            raise UnsupportedError(
                f"{stack.name}[{first}] and {stack.name}[{i}] are the same module, used twice. Use a separate one for "
                f"each block, or name another stack with HanayoStrategy(blocks=...)."
            )


_WORTH_SAYING = 0.05
"""a stack with a smaller share of the parameters in blocks costs little"""
_MAY_BE_ALL = 0.01
"""a list with a smaller share of the parameters isn't what a step calls in place of the largest one"""


def uncut_stacks(model: nn.Module, cut: Stack, called: Collection[str] | None = None) -> dict[Stack, float]:
    """The stacks that stay whole where `cut` is made into stages, the largest first; small ones are left out.

    With the share of the parameters in the blocks of all stacks that each has. `called`: the names of those that the
    step calls, if they are known.
    """
    seen, others = _modules(cut), []
    may_stay = (one for one in _stacks(model) if (one.is_uniform if called is None else one.name in called))
    for other in sorted(may_stay, key=_size, reverse=True):
        if seen.isdisjoint(_modules(other)):  # they have no module in common with `cut`, or with a larger one
            seen |= _modules(other)
            others.append(other)
    inside = {parameter for stack in (cut, *others) for parameter in stack.parameters}
    total = sum(parameter.numel() for parameter in inside)
    shares = {one: sum(p.numel() for p in one.parameters - cut.parameters) / total for one in others}
    worth_saying = [one for one in others if shares[one] >= _WORTH_SAYING]
    return {one: shares[one] for one in sorted(worth_saying, key=lambda one: -shares[one])}


def describe_uncut(model: nn.Module, cut: Stack, called: Collection[str] | None = None) -> str:
    """A message about the stacks that stay whole, with the way out; empty if there is none.

    Example:
        T5Model has 2 stacks of blocks, of which one is cut: decoder.block (6 blocks: T5Block). Whole on pipeline rank
        0: encoder.block (43% of the parameters in blocks). HanayoStrategy(blocks='encoder.block') cuts it instead.
    """
    uncut = uncut_stacks(model, cut, called)
    if not uncut:
        return ""
    whole = ", ".join(f"{one.name} ({share:.0%} of the parameters in blocks)" for one, share in uncut.items())
    beside = [one for one in (cut, *uncut) if len(one) == len(cut)]
    rows = [one.name for one in beside if one.name.rpartition(".")[0] == cut.name.rpartition(".")[0]]
    text = (
        f"{type(model).__name__} has {1 + len(uncut)} stacks of blocks, of which one is cut: {cut}. Whole on pipeline "
        f"rank 0: {whole}. HanayoStrategy(blocks={next(iter(uncut)).name!r}) cuts that stack instead."
    )
    if len(rows) > 1:
        text += f" If a loop calls them in turn, blocks={rows}, in the order of its calls, cuts them all."
    return text
