"""Which linear layers can be sharded, the report of a conversion, and how a conversion is undone.

model.layers.0..11.mlp.up_proj      nn.Linear 768->3072     3-D, column-parallel
model.layers.0..11.norm             nn.LayerNorm            not converted           no linear layer
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from lightning_hanayo.divisibility import Divisibility
from lightning_hanayo.linear_modules import has_gradient_hooks
from lightning_hanayo.tensor_parallel.convert.block_specs import class_name, joined
from lightning_hanayo.tensor_parallel.layers.linear import features
from lightning_hanayo.tensor_parallel.stage_context import StageContext


class ParameterOwners:
    """How many modules of a stack's blocks hold each parameter: a module in two blocks counts twice, as each block has
    a context of its own. Those that are used `outside` too count once more.

    The modules called `exclude`, and all in them, are not to be sharded.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], outside: Iterable[Tensor] = (), exclude: Collection[str] = ()
    ) -> None:
        own = (p for block in blocks for module in block.modules() for p in module._parameters.values())
        self._count: Counter[Tensor] = Counter(parameter for parameter in own if parameter is not None)
        self._count.update(outside)
        paths = ((f".{path}.", part) for block in blocks for path, part in block.named_modules())
        self.excluded = {part for path, part in paths if any(f".{name}." in path for name in exclude)}

    def shared_parameter(self, module: nn.Module) -> str | None:
        """Returns the name of a parameter that `module` shares with another module; None if there is none."""
        return next((name for name, p in module._parameters.items() if p is not None and self._count[p] > 1), None)


def reason_ineligible(module: nn.Module, owners: ParameterOwners) -> str | None:
    """Returns why a linear layer's parameters can't be sharded; None if they can."""
    weight = module._parameters.get("weight")
    if module in owners.excluded:
        return "left out by cube_exclude"
    if weight is None:
        return "its weight is computed from other parameters"
    if any(name not in ("weight", "bias") for name in module._parameters):
        return "it has parameters besides weight and bias"
    return reason_unshared(module, owners)


def reason_unshared(module: nn.Module, owners: ParameterOwners) -> str | None:
    """Returns why no module with such parameters could be sharded; None if it can."""
    if name := owners.shared_parameter(module):
        return f"its {name} is another module's too"
    if any(has_gradient_hooks(parameter) for parameter in module._parameters.values() if parameter is not None):
        return "its parameters have hooks, which would see a part of each"
    return "its instance has a forward of its own" if has_instance_forward(module) else None


def has_instance_forward(module: nn.Module) -> bool:
    """Returns whether this instance runs another forward than its class's, and not one of this package."""
    forward = vars(module).get("forward")
    return forward is not None and not getattr(forward, "__module__", "").startswith("lightning_hanayo.")


NOT_CONVERTED = "not converted"


@dataclass(frozen=True)
class ReportRow:
    """The outcome of one module of block number `block`, and the reason why it couldn't be converted."""

    block: int
    path: str
    layer: str
    outcome: str
    reason: str = ""


@dataclass(eq=False)
class BlockPlan:
    """How block `number` of a stack is parallelized: planned on all ranks alike, without a process group."""

    block: nn.Module
    number: int
    steps: list[Callable[[StageContext], object]] = field(default_factory=list)
    """parallelize its parts in place, in this order"""
    products: list[tuple[tuple[str, ...], bool]] = field(default_factory=list)
    """the linear layers that are one product each, by their paths in the block, and whether row-parallel"""
    required: list[Divisibility] = field(default_factory=list)
    """sizes that must divide over the mesh"""
    outcomes: dict[str, str] = field(default_factory=dict)
    """what becomes of modules, by their paths"""
    reasons: dict[str, str] = field(default_factory=dict)
    """why others can't be converted, by their paths"""

    def rows(self) -> Iterator[ReportRow]:
        """Yields the outcomes in the block's order."""
        for path, module in self.block.named_modules():
            outcome, reason = self.outcomes.get(path, NOT_CONVERTED), self.reasons.get(path, "")
            if reason or outcome is not NOT_CONVERTED:
                yield ReportRow(self.number, path, describe(module), outcome, reason)


def report(stack: str, headline: str, rows: Iterable[ReportRow]) -> str:
    """Returns a table of all blocks of a stack. Rows that are equal in several blocks are one line."""
    blocks: dict[ReportRow, list[int]] = {}
    for row in rows:
        blocks.setdefault(replace(row, block=0), []).append(row.block)
    lines = [
        (joined(stack, _ranges(numbers), row.path), row.layer, row.outcome, row.reason)
        for row, numbers in blocks.items()
    ]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(4)]
    table = ("   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([headline, *(f"  {line.rstrip()}" for line in table)])


def describe(module: nn.Module) -> str:
    """Returns how a report calls a module: "nn.Linear 768->3072", "peft.tuners.lora.layer.Linear"."""
    name, weight = class_name(type(module)), module._parameters.get("weight")
    if weight is None or name not in (class_name(nn.Linear), "transformers.pytorch_utils.Conv1D"):
        return short_class_name(type(module))
    out, in_ = features(module)
    return f"{short_class_name(type(module))} {in_}->{out}"


def short_class_name(cls: type) -> str:
    """Returns the usual name of a class of torch or `transformers`, and the qualified name of any other."""
    if cls.__module__.startswith("torch.nn.modules.") and getattr(nn, cls.__name__, None) is cls:
        return f"nn.{cls.__name__}"
    return cls.__name__ if cls.__module__.startswith("transformers.") else class_name(cls)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] to "0..2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


_MISSING = object()


@dataclass
class ModuleChanges:
    """The class of each module, and those of its attributes that were changed, as they were before.

    So a trained model can become an ordinary one again.
    """

    _before: dict[nn.Module, tuple[type[nn.Module], dict[str, Any]]] = field(default_factory=dict)

    @contextmanager
    def recorded(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Record changes of these modules inside the context, except of their parameters and buffers."""
        before = {module: (type(module), dict(vars(module))) for module in modules}
        yield
        for module, (kind, attributes) in before.items():
            names = {*attributes, *vars(module)}
            old = {name: attributes.get(name, _MISSING) for name in names}
            self._before[module] = kind, {n: v for n, v in old.items() if vars(module).get(n, _MISSING) is not v}

    def undo(self, copies: Mapping[nn.Module, nn.Module] | None = None) -> None:
        """Restore the modules; if given, their `copies` instead, of those that the model still has."""
        for module, (kind, attributes) in self._before.items():
            restored = module if copies is None else copies.get(module)
            if restored is None:
                continue
            restored.__class__ = kind
            for name, value in attributes.items():
                if value is _MISSING:
                    vars(restored).pop(name, None)
                else:
                    vars(restored)[name] = value
        if copies is None:
            self._before.clear()
