"""The swap: a stack's layers become ones that are spread over the grid, by their kinds; what doesn't is reported.

all blocks of a known kind     they run wholly over the grid, in their own code: one exchange at each end of the stack
any other                      each linear layer converts its own rows in and out; all else stays as it is

What a user adds: `register_block` and `register_layer`, two lines each.
"""

from collections.abc import Collection, Sequence
from itertools import chain

from torch import Tensor, nn

from lightning_hanayo.tensor3d.convert.eligibility import Owners
from lightning_hanayo.tensor3d.convert.generic import GenericBlock
from lightning_hanayo.tensor3d.convert.registered import RegisteredBlock, Unlike
from lightning_hanayo.tensor3d.convert.report import Report, called
from lightning_hanayo.tensor3d.convert.specs.layers import leave
from lightning_hanayo.tensor3d.convert.specs.registry import block_kind, register_block, register_layer
from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, Part
from lightning_hanayo.tensor3d.divisibility import Grid3, check
from lightning_hanayo.tensor3d.stage_context import StageContext

__all__ = ["BlockSpec", "Part", "ParallelizePlan", "leave", "plan_swap", "register_block", "register_layer"]

TOKENS = 2048
"""of a micro-batch, where nobody says"""


class ParallelizePlan:
    """What becomes of a stack. Made by `plan_swap`, alike on all ranks.

    Args:
        blocks: by module, what is done to each.
        report: of all.
    """

    def __init__(self, blocks: Sequence[RegisteredBlock] | Sequence[GenericBlock], report: Report) -> None:
        self._blocks = {block.block: block for block in blocks}
        self.report = report
        first = blocks[0] if blocks else None
        known = first if isinstance(first, RegisteredBlock) else None
        self.known = known is not None
        """whether the blocks run wholly over the grid"""
        self.streams = known.streams if known is not None else ()
        """the names of the block forward's arguments that carry residual streams"""
        self.batch_dim, self.sequence_dim = (0, 1) if known is None or known.batch_first else (1, 0)

    def install(self, blocks: Sequence[nn.Module], setting: StageContext) -> None:
        """Spread `blocks`, one stage's, in place: parameter objects, names and attributes stay."""
        for block in blocks:
            self._blocks[block].install(setting)


def plan_swap(
    blocks: Sequence[nn.Module],
    name: str,
    sizes: Grid3,
    *,
    tokens: int | None = None,
    outside: Collection[Tensor] = (),
) -> ParallelizePlan:
    """Decide what becomes of each layer. Needs no processes.

    Args:
        blocks: the whole stack.
        name: its qualified name.
        sizes: the grid's x, y and z.
        tokens: a guess at a micro-batch's, by which layers of unknown blocks choose what travels.
        outside: parameters that are used outside the stack, too: those of the blocks stay dense.

    Raises:
        HanayoError: the blocks are known, but their heads or features don't divide over the grid.
    """
    owners = Owners(blocks, outside)
    try:
        known = _all_known(blocks, name, owners)
    except Unlike as why:
        unknown = [GenericBlock(block, i, owners, sizes, tokens or TOKENS) for i, block in enumerate(blocks)]
        rows = tuple(chain.from_iterable(block.rows() for block in unknown))
        headline = f"{name}: blocks of an unknown kind, whose linear layers convert their own rows, as {why}"
        return ParallelizePlan(unknown, Report(name, headline, rows))
    check([need for block in known for need in block.needs()], sizes)
    rows = tuple(chain.from_iterable(block.rows() for block in known))
    return ParallelizePlan(known, Report(name, f"{name}: {len(known)} blocks wholly over the grid {sizes}", rows))


def _all_known(blocks: Sequence[nn.Module], name: str, owners: Owners) -> list[RegisteredBlock]:
    found: list[RegisteredBlock] = []
    for i, block in enumerate(blocks):
        kind = block_kind(block)
        if kind is None:
            raise Unlike(f"{name}.{i} is a {called(type(block))}, which isn't registered")
        found.append(RegisteredBlock(block, kind, i, f"{name}.{i}"))
        found[-1].check(owners)
        if (found[-1].streams, found[-1].batch_first) != (found[0].streams, found[0].batch_first):
            raise Unlike(f"{name}.{i} has other residual streams, or dimensions in another order, than {name}.0")
    return found
