"""Plans and applies the conversion of a block stack to 3-D parallel layers.

all blocks registered    they are parallelized whole, in their own code: one reshard at each end of the stack
any other block          all are generic: each linear layer is parallelized by itself, everything else stays as it is

Users register their own blocks with `register_block` and `register_layer`.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from lightning_hanayo.divisibility import Divisibility, MeshSizes, check_divisibility
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.tensor_parallel.convert import conversion
from lightning_hanayo.tensor_parallel.convert.generic_block import Experts, GenericBlock
from lightning_hanayo.tensor_parallel.convert.registered_block import RegisteredBlock, SpecMismatch
from lightning_hanayo.tensor_parallel.convert.specs import block_spec
from lightning_hanayo.tensor_parallel.stage_context import StageContext

DEFAULT_TOKENS = 2048
"""of a micro-batch, where nobody says"""


class ParallelizePlan:
    """The plan for a stack. Made by `plan_parallelize`, alike on all ranks."""

    def __init__(
        self, blocks: Sequence[RegisteredBlock] | Sequence[GenericBlock], report: conversion.ConversionReport
    ) -> None:
        self._blocks = {block.block: block for block in blocks}
        self._changes = conversion.ModuleChanges()
        self.report = report
        first = blocks[0] if blocks else None
        registered = first if isinstance(first, RegisteredBlock) else None
        self.is_registered = registered is not None
        """whether the blocks are registered, and parallelized whole"""
        self.streams = () if registered is None else registered.spec.streams
        """the names of the block forward's arguments that carry residual streams"""
        self.masks = () if registered is None else registered.spec.masks
        self.batch_dim, self.sequence_dim = (0, 1) if registered is None or registered.batch_first else (1, 0)

    def products(self, block: nn.Module) -> list[tuple[tuple[str, ...], bool]]:
        """Returns the linear layers of a block that are one product each, by their paths, and whether row-parallel."""
        return list(self._blocks[block].products())

    def divisibility(self) -> list[Divisibility]:
        """Returns the sizes that must divide over the mesh."""
        return [one for block in self._blocks.values() for one in block.divisibility()]

    def install(self, blocks: Sequence[nn.Module], context: StageContext) -> None:
        """Parallelize `blocks`, those of one stage, in place. Parameter objects, names and attributes stay."""
        with self._changes.recorded(part for block in blocks for part in block.modules()):
            for block in blocks:
                self._blocks[block].install(context)

    def undo(self, copies: Mapping[nn.Module, nn.Module] | None = None) -> None:
        """Give the modules their own classes and attributes back, or those of their `copies`. Parameters stay."""
        self._changes.undo(copies)


def plan_parallelize(
    blocks: Sequence[nn.Module],
    name: str,
    sizes: MeshSizes,
    *,
    tokens: int | None = None,
    outside: Collection[Tensor] = (),
    exclude: Collection[str] = (),
    experts: Experts = "whole",
) -> ParallelizePlan:
    """Plan the conversion of each layer. Needs no process group.

    Example:
        >>> plan = plan_parallelize(list(model.layers), "layers", mesh.sizes)
        >>> print(plan.report)
        >>> plan.install(list(model.layers), StageContext(mesh))

    Args:
        blocks: the whole stack.
        name: its qualified name.
        sizes: the mesh's.
        tokens: an estimate of the tokens of a micro-batch, by which generic blocks choose the tensors to communicate.
        outside: parameters that are used outside the stack too. The layers in blocks that hold them aren't converted.
        exclude: names of modules in blocks, such as "experts" or "mlp.extra": neither they nor modules inside them are
            converted.
        experts: whether fused experts of generic blocks are "whole" on each rank while a batch runs, or shared over
            the ranks of y and z, the "cube".

    Raises:
        HanayoError: the blocks are registered, but their heads or features don't divide over the mesh; or experts are
            to be shared, and there are none that can be.
    """
    owners = conversion.ParameterOwners(blocks, outside, exclude)
    found: list[RegisteredBlock] | list[GenericBlock]
    try:
        found = _all_registered(blocks, name, owners)
        check_divisibility([one for block in found for one in block.divisibility()], sizes)
        headline = f"{name}: {len(found)} registered blocks, parallelized whole over the mesh {sizes}"
    except SpecMismatch as reason:
        experts = experts if sizes[1] * sizes[2] > 1 else "whole"
        found = [
            GenericBlock(block, i, owners, sizes, tokens or DEFAULT_TOKENS, experts) for i, block in enumerate(blocks)
        ]
        headline = f"{name}: {len(found)} generic blocks, whose linear layers are converted one by one, as {reason}"
    if experts == "cube" and not any(isinstance(block, GenericBlock) and block.experts for block in found):
        raise HanayoError(
            f"experts='cube': the blocks of {name} have no experts that a cube's ranks could share: modules of "
            f"transformers with the weights of all experts in one tensor, as in Mixtral. Leave experts='cube' out."
        )
    rows = tuple(row for block in found for row in block.report_rows())
    return ParallelizePlan(found, conversion.ConversionReport(name, headline, rows))


def _all_registered(
    blocks: Sequence[nn.Module], name: str, owners: conversion.ParameterOwners
) -> list[RegisteredBlock]:
    """Returns the blocks with their specs.

    Raises:
        SpecMismatch: a block isn't registered, differs from its spec, or has other streams than the first block.
    """
    found: list[RegisteredBlock] = []
    for i, block in enumerate(blocks):
        spec = block_spec(block)
        if spec is None:
            raise SpecMismatch(f"{name}.{i} is a {conversion.short_class_name(type(block))}, which isn't registered")
        found.append(RegisteredBlock(block, spec, i, f"{name}.{i}"))
        found[-1].check(owners)
        if (spec.streams, found[-1].batch_first) != (found[0].spec.streams, found[0].batch_first):
            raise SpecMismatch(f"{name}.{i} has other residual streams, or dimensions in another order, than {name}.0")
    return found
