"""Says which stacks of a model a pipeline leaves whole, as the encoder of T5, and what each of them costs.

encoder.block   whole on pipeline rank 0       decoder.block   cut into stages
"""

from dataclasses import dataclass
from itertools import chain

from torch import nn

from lightning_hanayo.partition.stack import Stack, other_stacks

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
    others = other_stacks(model, cut)
    inside = {parameter for stack in (cut, *others) for parameter in stack.parameters}
    total = sum(parameter.numel() for parameter in inside)
    sizes = [sum(parameter.numel() for parameter in stack.parameters - cut.parameters) for stack in others]
    found = [UncutStack(stack, size, size / total) for stack, size in zip(others, sizes, strict=True)]
    return sorted((one for one in found if one.share >= _WORTH_SAYING), key=lambda one: -one.num_parameters)


def describe_uncut(model: nn.Module, cut: Stack, num_pipeline_ranks: int) -> str:
    """What to say of the stacks that stay whole, and what the user can do; empty if there is none.

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
    return (
        f"{type(model).__name__} has {1 + len(uncut)} stacks of blocks, of which one is cut: {cut.name} "
        f"({len(cut)} blocks, {_count(size)} parameters). Whole on pipeline rank 0: {', '.join(map(_described, uncut))}"
        f".{_limit(uncut, num_pipeline_ranks)} HanayoStrategy(blocks={uncut[0].stack.name!r}) cuts that stack instead."
    )


def _described(uncut: UncutStack) -> str:
    stack = uncut.stack
    frozen = "" if any(p.requires_grad for p in stack.parameters) else ", frozen"
    return (
        f"{stack.name} ({len(stack)} blocks, {_count(uncut.num_parameters)} parameters, "
        f"{uncut.share:.0%} of those in blocks{frozen})"
    )


def _limit(uncut: list[UncutStack], num_pipeline_ranks: int) -> str:
    """How much faster the pipeline can be than one rank: rank 0 computes all that is whole."""
    share = sum(one.share for one in uncut)
    trained = all(p.requires_grad for p in chain.from_iterable(one.stack.parameters for one in uncut))
    if not trained or share * num_pipeline_ranks <= 1:
        return ""
    return (
        f" If each parameter costs the same computation, {num_pipeline_ranks} pipeline ranks are at most "
        f"{1 / share:.1f} times as fast as one, since rank 0 computes all that is whole."
    )


def _count(number: int) -> str:
    """A number of parameters, in a unit that suits it: 34.6 M."""
    for factor, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return str(number)
