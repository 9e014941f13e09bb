"""The ownership: which pipeline rank holds which parameters, and placeholders for those of the others.

rank 0    embedding, head   block 0  .  .  block 3  block 4  .  .  block 7          a dot is a block of
rank 1          .           .  block 1  block 2  .  .  block 5  block 6  .          `meta` parameters
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.stack import Stack


@dataclass(frozen=True)
class Ownership:
    """The blocks of each stage and the rank of each stage; what lies outside the stack belongs to stage 0."""

    stack: Stack
    stages: tuple[range, ...]
    stage_ranks: tuple[int, ...]

    def blocks(self, stage: int) -> list[nn.Module]:
        """The blocks of `stage`; none for a loss stage."""
        return [self.stack.blocks[i] for i in self.stages[stage]]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that lie on a pipeline rank."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    def stage_parameters(self, model: nn.Module, stage: int) -> list[nn.Parameter]:
        """The parameters of `stage`, in the model's order. One that several stages use belongs to the lowest of them.

        Its gradient is complete after that stage's backward. What code outside the stack uses belongs to stage 0.
        """
        stages = reversed(range(len(self.stages)))
        lowest = {p: s for s in stages for block in self.blocks(s) for p in block.parameters()}
        lowest |= {p: 0 for module in outside_modules(model, self.stack) for p in module.parameters(recurse=False)}
        return [parameter for parameter in model.parameters() if lowest[parameter] == stage]

    def parameters_of_several(self, model: nn.Module) -> set[nn.Parameter]:
        """Those that two stages use, or a block and the code outside the stack."""
        users: Counter[nn.Parameter] = Counter()
        for stage in range(len(self.stages)):
            users.update({parameter for block in self.blocks(stage) for parameter in block.parameters()})
        outside = outside_modules(model, self.stack)
        users.update({parameter for module in outside for parameter in module.parameters(recurse=False)})
        return {parameter for parameter, count in users.items() if count > 1}

    def rank_of_names(self, model: nn.Module) -> dict[str, int]:
        """The pipeline rank that holds each entry of `model.state_dict()`."""
        rank_of_block = {i: self.stage_ranks[stage] for stage, run in enumerate(self.stages) for i in run}
        prefix = f"{self.stack.name}."
        keys = [name for name, _ in self.stack_children(model)]
        ranks = {f"{prefix}{key}.": rank_of_block[i] for i, key in enumerate(keys)}
        return {
            name: next((rank for start, rank in ranks.items() if name.startswith(start)), 0)
            for name in model.state_dict()
        }

    def stack_children(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The stack's blocks with their names in it."""
        return list(model.get_submodule(self.stack.name).named_children())

    def check(self, model: nn.Module) -> None:
        """See that no parameter lies on two ranks.

        Raises:
            UnsupportedError: blocks on different ranks share a parameter, or a block shares one with the code outside
                and lies on another rank than 0.
        """
        owners: dict[nn.Parameter, tuple[str, int]] = {}
        ranks = self.rank_of_names(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            other, rank = owners.setdefault(parameter, (name, ranks.get(name, 0)))
            if rank != ranks.get(name, 0):
                raise UnsupportedError(
                    f"{other} and {name} are one parameter, but lie on pipeline ranks {rank} and {ranks.get(name, 0)}. "
                    f"A tied embedding and head is fine (both lie on rank 0); blocks can't share weights across ranks."
                )


class Placeholder(nn.Parameter):
    """What stands for another rank's parameter: it lies on meta for good, and not because it has no values yet."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """So that a copy made by pickle is one too."""
        return _made_again, (self.data, self.requires_grad, vars(self))


def _made_again(data: torch.Tensor, requires_grad: bool, marks: dict[str, Any]) -> Placeholder:
    placeholder = Placeholder(data, requires_grad)
    vars(placeholder).update(marks)
    return placeholder


def leave_out(model: nn.Module, keep: set[nn.Parameter], elsewhere: Iterable[nn.Module] = ()) -> None:
    """Replace all parameters but those in `keep` by `meta` placeholders, and the buffers of the modules `elsewhere`.

    Placeholders are new Parameters with the same shape, dtype, requires_grad and ties; optimizers, parameter groups and
    state dicts keep their single-process indices and names.
    """
    known: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in keep:
                module._parameters[name] = _placeholder(parameter, known)  # type: ignore[assignment]
    for module in elsewhere:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")


def _placeholder(parameter: nn.Parameter, known: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if isinstance(parameter, Placeholder):
        return parameter
    if parameter not in known:
        marks = vars(parameter)  # that users and optimizers put on parameters
        known[parameter] = _made_again(torch.empty_like(parameter, device="meta"), parameter.requires_grad, marks)
    return known[parameter]


def outside_modules(model: nn.Module, stack: Stack) -> Sequence[nn.Module]:
    """The modules that aren't blocks, nor parts of one."""
    inside = {part for block in stack.blocks for part in block.modules()}
    return [module for module in model.modules() if module not in inside]
