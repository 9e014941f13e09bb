"""Says which pipeline rank owns which parameters.

rank 0    embedding, head   block 0  .  .  block 3  block 4  .  .  block 7          a dot is a block of
rank 1          .           .  block 1  block 2  .  .  block 5  block 6  .          placeholders on meta
"""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.stack import Stack, modules_outside


@dataclass(frozen=True)
class Ownership:
    """The blocks of each stage, and the pipeline rank of each stage. Parameters outside the stack belong to stage 0."""

    stack: Stack
    stages: tuple[range, ...]
    """the indices of each stage's blocks"""
    stage_ranks: tuple[int, ...]

    def blocks(self, stage: int) -> list[nn.Module]:
        """The blocks of `stage`; none for a loss stage."""
        return [self.stack.blocks[i] for i in self.stages[stage]]

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    def stage_parameters(self, model: nn.Module, stage: int) -> list[nn.Parameter]:
        """The parameters of `stage`, in the model's order. One that several stages use belongs to the lowest of them.

        Its gradient is complete after that stage's backward. A parameter used outside the stack belongs to stage 0.
        """
        stages = reversed(range(len(self.stages)))
        lowest = {p: s for s in stages for block in self.blocks(s) for p in block.parameters()}
        lowest |= {p: 0 for module in modules_outside(model, self.stack) for p in module.parameters(recurse=False)}
        return [parameter for parameter in model.parameters() if lowest[parameter] == stage]

    def tied_parameters(self, model: nn.Module) -> set[nn.Parameter]:
        """The parameters that two stages use, or a block and the code outside the stack."""
        users: Counter[nn.Parameter] = Counter()
        for stage in range(len(self.stages)):
            users.update({parameter for block in self.blocks(stage) for parameter in block.parameters()})
        outside = modules_outside(model, self.stack)
        users.update({parameter for module in outside for parameter in module.parameters(recurse=False)})
        return {parameter for parameter, count in users.items() if count > 1}

    def rank_by_name(self, model: nn.Module) -> dict[str, int]:
        """The pipeline rank that owns each entry of `model.state_dict()`."""
        rank_of_block = {i: self.stage_ranks[stage] for stage, blocks in enumerate(self.stages) for i in blocks}
        block_names = [name for name, _ in model.get_submodule(self.stack.name).named_children()]
        rank_by_prefix = {f"{self.stack.name}.{name}.": rank_of_block[i] for i, name in enumerate(block_names)}
        return {
            name: next((rank for prefix, rank in rank_by_prefix.items() if name.startswith(prefix)), 0)
            for name in model.state_dict()
        }

    def check(self, model: nn.Module) -> None:
        """Check that each parameter belongs to one rank only.

        Raises:
            UnsupportedError: blocks on different ranks share a parameter, or a block on a rank other than 0 shares one
                with the code outside the stack.
        """
        owners: dict[nn.Parameter, tuple[str, int]] = {}
        ranks = self.rank_by_name(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            rank = ranks.get(name, 0)
            other_name, other_rank = owners.setdefault(parameter, (name, rank))
            if other_rank != rank:
                raise UnsupportedError(
                    f"{other_name} and {name} are the same parameter, but belong to pipeline ranks {other_rank} and "
                    f"{rank}. A tied embedding and head is fine (both belong to rank 0); blocks can't share weights "
                    f"across ranks."
                )
