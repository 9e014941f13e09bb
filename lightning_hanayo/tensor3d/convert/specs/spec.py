"""The kind: a description of a block's class, from which its blocks are spread over the grid with their own code.

residual stream     [batch/x, seq/y, h/z]      norms, dropouts, sums; entered and left by the linear layers
inside              [batch/x, seq, n/(y z)]    between a first and a second linear layer: heads, activations

Paths are those of submodules, as "attn.c_attn".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Part:
    """The module that reads the residual stream, with the linear layers that do it: an attention, or an MLP's front.

    Args:
        path: in the block; "" is the block itself.
        first: its linear layers that read the residual stream, paths in this module.
        input: the name of its forward's argument that several of them read: that is brought together once.
        head_size: features per head, as an attribute's name or a function of the module; None: it has no heads.
        fused: how many projections lie one behind the other in each layer: 3 for q, k and v in one.
        local: attributes that count heads or features, of which each rank has its part.
        whole: norms of each head's features, paths in this module: the same on every rank.
        dropout: the attribute with the probability that the forward gives to its attention, as "dropout.p".
    """

    path: str
    first: tuple[str, ...]
    input: str | None = None
    head_size: str | Callable[[Any], int] | None = None
    fused: int = 1
    local: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    dropout: str | None = None


@dataclass(frozen=True)
class BlockSpec:
    """One class of blocks. Layers that aren't named are found by their own kind: norms, dropouts, activations.

    Example:
        >>> BlockSpec(("x",), (Part("", ("up",)),), ("down",))

    Args:
        streams: the forward's arguments that carry residual streams.
        parts: with the first linear layers.
        second: the linear layers that lead back to the residual stream, paths in the block.
        batch_first: whether a block's streams are [batch, seq, h]; None: all are.
        functions: attributes with functions that are applied to parts of the features.
        expects: attributes that must have these values, or the block is of an unknown kind.
        sets: attributes that get these values when the block is spread.
        made_of: classes of submodules that come from elsewhere than the block's own Python module.
    """

    streams: tuple[str, ...]
    parts: tuple[Part, ...]
    second: tuple[str, ...]
    batch_first: Callable[[Any], bool] | None = None
    functions: tuple[str, ...] = ()
    expects: Mapping[str, Any] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)
    made_of: tuple[type[nn.Module], ...] = ()


def attribute(module: Any, path: str) -> Any:
    """What lies at a dotted path; an `AttributeError` if nothing does."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def set_attribute(module: Any, path: str, value: Any) -> None:
    """Put it there."""
    *owners, name = path.split(".")
    setattr(attribute(module, ".".join(owners)) if owners else module, name, value)


def class_name(kind: type) -> str:
    """Where a class comes from and what it is called: "transformers.models.gpt2.modeling_gpt2.GPT2Block"."""
    return f"{kind.__module__}.{kind.__qualname__}"
