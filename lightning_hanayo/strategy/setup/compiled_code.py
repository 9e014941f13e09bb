"""Runs uncompiled, for the time of a run, what can't be compiled: code around the stack, and some blocks of cubes.

torch.compile(model), self.compile(), @torch.compile    the step is suspended at each block: no graph can contain it
blocks of a pipeline                                     stay compiled, where they run
registered blocks of a cube, by block.compile()          stay compiled: their layers are operators in the graph
other blocks of a cube                                   ranks ask each other before each layer: no graph contains that
mode="reduce-overhead", "max-autotune"                   rejected: CUDA graphs write into the memory of earlier outputs
"""

import warnings
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any, Literal

import lightning.pytorch as pl
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.stack import Stack, original
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

_ENTRIES = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_ORIGINAL = "_torchdynamo_orig_callable"
"""what torch.compile made a function of"""


def check_cuda_graphs(model: nn.Module, stack: Stack) -> None:
    """Reject modules that CUDA graphs run: each micro-batch would overwrite what the one before has left.

    Those around the stack run as written, and may be compiled in any way.

    Raises:
        UnsupportedError: a module is compiled in such a mode.
    """
    blocks = set(stack.blocks)
    for name, part in model.named_modules():
        if _uses_cuda_graphs(part) and not _is_around(part, blocks):
            raise UnsupportedError(
                f"{name} is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune', or the option "
                f"'triton.cudagraphs'). They write each result where the one before was, but on a pipeline several "
                f"micro-batches run forward before the first one's backward. Compile it with the default mode, or with "
                f"mode='max-autotune-no-cudagraphs'."
            )


def run_uncompiled(
    module: "pl.LightningModule",
    stack: Stack,
    attributes: TemporaryAttributes,
    *,
    cube: Literal["registered", "generic"] | None = None,
) -> None:
    """Give what is compiled around the stack its own code, in a cube also blocks, and warn with their names.

    `cube` says which blocks a cube has; None without one.
    """
    blocks, parts = set(stack.blocks), dict(module.named_modules())
    around = {name: part for name, part in parts.items() if _is_around(part, blocks)}
    names = [*_steps(module, attributes), *_uncompiled(around, attributes)]
    if names:
        warnings.warn(
            f"{', '.join(name or type(module).__name__ for name in names)}: compiled, but run as written, because "
            f"the step is suspended at the stack {stack.name!r}, which runs on several ranks. Compile the blocks "
            f"instead, with block.compile().",
            stacklevel=2,
        )
    in_blocks = {part for block in blocks for part in block.modules()}
    inside = {name: part for name, part in parts.items() if original(part) in in_blocks}
    if cube == "registered":
        inside = {name: part for name, part in inside.items() if original(part) is not part}
    names = [] if cube is None else _uncompiled(inside, attributes)
    if names:
        way_out = "Compile them in place, with block.compile()" if cube == "registered" else "Set cube=1"
        warnings.warn(
            f"{', '.join(names)}: compiled, but run as written, because layers in the stack {stack.name!r} "
            f"communicate in the cube. {way_out} to run them compiled.",
            stacklevel=2,
        )


def _uses_cuda_graphs(part: nn.Module) -> bool:
    """Whether the module, its call or its `forward` is compiled so that inductor records CUDA graphs."""
    compiled: tuple[Any, ...] = part, part._compiled_call_impl, part.forward
    configs = [one.get_compiler_config() for one in compiled if hasattr(one, "get_compiler_config")]
    return any(config is not None and config.get("triton.cudagraphs", False) for config in configs)


def _is_around(part: nn.Module, blocks: set[nn.Module]) -> bool:
    """Whether blocks are in it, and it is none of them, nor a compiled one."""
    return blocks.isdisjoint((part, original(part))) and not blocks.isdisjoint(part.modules())


def _steps(module: "pl.LightningModule", attributes: TemporaryAttributes) -> Iterable[str]:
    """Replace the module's compiled methods, and yield their names."""
    for name in _ENTRIES:
        method = getattr(module, name)
        plain = getattr(method, _ORIGINAL, None)
        if plain is not None:
            attributes.set(module, name, MethodType(plain, module) if isinstance(method, MethodType) else plain)
            yield name


def _uncompiled(parts: Mapping[str, nn.Module], attributes: TemporaryAttributes) -> list[str]:
    """Run the modules' own code where they are called; returns the names of those that were compiled."""
    return [name for name, part in parts.items() if _uncompile(part, attributes)]


def _uncompile(part: nn.Module, attributes: TemporaryAttributes) -> bool:
    inner = original(part)
    if inner is not part:
        attributes.set(part, "forward", inner)
    elif part._compiled_call_impl is not None:
        attributes.set(part, "_compiled_call_impl", None)
    else:
        return False
    return True
