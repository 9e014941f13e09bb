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
from lightning_hanayo.tensor_parallel.convert.block_specs import BlockSpec, block_spec
from lightning_hanayo.tensor_parallel.convert.generic_block import SHARED_EXPERTS, Experts, plan_generic
from lightning_hanayo.tensor_parallel.convert.registered_block import RegisteredBlock, SpecMismatch, is_batch_first
from lightning_hanayo.tensor_parallel.stage_context import StageContext

DEFAULT_TOKENS = 2048
"""of a micro-batch, where nobody says"""


class ParallelizePlan:
    """The plan for a stack. Made by `plan_parallelize`, alike on all ranks.

    `spec` is that of the first block if all are registered.
    """

    def __init__(
        self, blocks: Sequence[conversion.BlockPlan], name: str, headline: str, spec: BlockSpec | None
    ) -> None:
        self._blocks = {one.block: one for one in blocks}
        self._changes = conversion.ModuleChanges()
        self.rows = [row for one in blocks for row in one.rows()]
        """the outcome of each module"""
        self.report = conversion.report(name, headline, self.rows)
        self.is_registered = spec is not None
        """whether the blocks are registered, and parallelized whole"""
        self.streams = () if spec is None else spec.streams
        """the names of the block forward's arguments that carry residual streams"""
        self.masks = () if spec is None else spec.masks
        is_first = spec is None or is_batch_first(blocks[0].block, spec)
        self.batch_dim, self.sequence_dim = (0, 1) if is_first else (1, 0)

    def products(self, block: nn.Module) -> list[tuple[tuple[str, ...], bool]]:
        """Returns the linear layers of a block that are one product each, by their paths, and whether row-parallel."""
        return self._blocks[block].products

    def divisibility(self) -> list[Divisibility]:
        """Returns the sizes that must divide over the mesh."""
        return [one for block in self._blocks.values() for one in block.required]

    def install(self, blocks: Sequence[nn.Module], context: StageContext) -> None:
        """Parallelize `blocks`, those of one stage, in place. Parameter objects, names and attributes stay."""
        with self._changes.recorded(part for block in blocks for part in block.modules()):
            for step in (step for block in blocks for step in self._blocks[block].steps):
                step(context)

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
    spec = block_spec(blocks[0]) if blocks else None
    try:
        found = _all_registered(blocks, name, owners)
        check_divisibility([one for block in found for one in block.required], sizes)
        headline = f"{name}: {len(found)} registered blocks, parallelized whole over the mesh {sizes}"
    except SpecMismatch as reason:
        spec, experts = None, experts if sizes[1] * sizes[2] > 1 else "whole"
        tokens = tokens or DEFAULT_TOKENS
        found = [plan_generic(block, i, owners, sizes, tokens, experts) for i, block in enumerate(blocks)]
        headline = f"{name}: {len(found)} generic blocks, whose linear layers are converted one by one, as {reason}"
    if experts == "cube" and not any(SHARED_EXPERTS in block.outcomes.values() for block in found):
        raise HanayoError(
            f"experts='cube': the blocks of {name} have no experts that a cube's ranks could share: modules of "
            f"transformers with the weights of all experts in one tensor, as in Mixtral. Leave experts='cube' out."
        )
    return ParallelizePlan(found, name, headline, spec)


def _all_registered(
    blocks: Sequence[nn.Module], name: str, owners: conversion.ParameterOwners
) -> list[conversion.BlockPlan]:
    """Plan registered blocks.

    Raises:
        SpecMismatch: a block isn't registered, differs from its spec, or has other streams than the first block.
    """
    found: list[conversion.BlockPlan] = []
    streams = set()
    for i, block in enumerate(blocks):
        spec = block_spec(block)
        if spec is None:
            raise SpecMismatch(f"{name}.{i} is a {conversion.short_class_name(type(block))}, which isn't registered")
        found.append(RegisteredBlock(block, i, f"{name}.{i}", spec, owners))
        streams.add((spec.streams, is_batch_first(block, spec)))
        if len(streams) > 1:
            raise SpecMismatch(f"{name}.{i} has other residual streams, or dimensions in another order, than {name}.0")
    return found
