"""The description of a class of blocks, from which its blocks are parallelized with their own code.

residual stream              [batch/x, seq/y, h/z]      norms, dropouts, sums; read and written by the linear layers
between the linear layers    [batch/x, seq, n/(y z)]    column-parallel ones lead here, row-parallel ones lead back:
                                                        heads, activations

Paths are those of submodules, as "attn.c_attn". This module imports no torch: describing a block costs nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ProjectionGroup:
    """Linear layers of one module that read the residual stream: q, k and v of an attention, or an MLP's up.

    Args:
        path: the module's, in the block; "" is the block itself.
        column_parallel: the linear layers, paths in this module.
        input: the name of its forward's argument that several of them read, which is gathered once for all.
        head_size: features per head, as an attribute's name or a function of the module; None: it has no heads.
        num_fused: how many projections lie one after the other in each layer: 3 for q, k and v in one.
        sharded_counts: attributes that count heads or features, of which each rank has its part.
        replicated_norms: norms of each head's features, paths in this module: the same on every rank.
        dropout: the attribute with the probability that the forward gives to its attention, as "dropout.p".
    """

    path: str
    column_parallel: tuple[str, ...]
    input: str | None = None
    head_size: str | Callable[[Any], int] | None = None
    num_fused: int = 1
    sharded_counts: tuple[str, ...] = ()
    replicated_norms: tuple[str, ...] = ()
    dropout: str | None = None


@dataclass(frozen=True)
class BlockSpec:
    """One class of blocks. Norms, dropouts and activations aren't named: they are found by their own classes.

    Example:
        >>> BlockSpec(("x",), (ProjectionGroup("", ("up",)),), ("down",))

    Args:
        streams: the forward's arguments that carry residual streams.
        projections: the groups of column-parallel linear layers.
        row_parallel: the linear layers that lead back to the residual stream, paths in the block.
        batch_first: whether a block's streams are [batch, seq, h]; None: all are.
        elementwise_functions: attributes with functions that are applied to sharded features.
        required_values: attributes that must have these values, or the block isn't what is described here.
        overrides: attributes that get these values when the block is parallelized.
        containers: classes of submodules that are defined elsewhere than in the block's own Python module.
    """

    streams: tuple[str, ...]
    projections: tuple[ProjectionGroup, ...]
    row_parallel: tuple[str, ...]
    batch_first: Callable[[Any], bool] | None = None
    elementwise_functions: tuple[str, ...] = ()
    required_values: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    containers: tuple[type, ...] = ()


def attribute(module: Any, path: str) -> Any:
    """Returns the attribute at a dotted path. Raises an `AttributeError` if there is none."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def set_attribute(module: Any, path: str, value: Any) -> None:
    """Set the attribute at a dotted path."""
    *owners, name = path.split(".")
    setattr(attribute(module, ".".join(owners)) if owners else module, name, value)


def joined(*names: str) -> str:
    """Returns the dotted path of names, of which some may be empty."""
    return ".".join(name for name in names if name)


def class_name(cls: type) -> str:
    """Returns a class's qualified name: "transformers.models.gpt2.modeling_gpt2.GPT2Block"."""
    return f"{cls.__module__}.{cls.__qualname__}"
