"""The description of a class of blocks, from which its blocks are parallelized with their own code.

residual stream              [batch/x, seq/y, h/z]      norms, dropouts, sums; read and written by the linear layers
between the linear layers    [batch/x, seq, n/(y z)]    column-parallel ones lead here, row-parallel ones lead back:
                                                        heads, activations

Paths are those of submodules, as "attn.c_attn". Blocks are registered by class name: torch's, Hugging Face's GPT-2,
BERT, and Llama with its like, and the user's. This module imports no torch: describing a block costs nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


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
        streams: the forward's arguments that carry residual streams, also a memory: each may have its own length.
        projections: the groups of column-parallel linear layers.
        row_parallel: the linear layers that lead back to the residual stream, paths in the block.
        masks: the forward's arguments that are the same for all samples if they have two dimensions, [seq, seq]: their
            first one may be as long as there are samples by chance.
        batch_first: whether a block's streams are [batch, seq, h]; None: all are.
        elementwise_functions: attributes with functions that are applied to sharded features.
        required_values: attributes that must have these values, or the block isn't the described one.
        overrides: attributes that get these values when the block is parallelized.
        containers: classes of submodules that are defined elsewhere than in the block's own Python module.
    """

    streams: tuple[str, ...]
    projections: tuple[ProjectionGroup, ...]
    row_parallel: tuple[str, ...]
    masks: tuple[str, ...] = ()
    batch_first: Callable[[Any], bool] | None = None
    elementwise_functions: tuple[str, ...] = ()
    required_values: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    containers: tuple[type, ...] = ()


def set_attribute(module: Any, path: str, value: Any) -> None:
    """Set the attribute at a dotted path."""
    *owners, name = path.split(".")
    setattr(attrgetter(".".join(owners))(module) if owners else module, name, value)


def joined(*names: str) -> str:
    """Returns the dotted path of names, of which some may be empty."""
    return ".".join(name for name in names if name)


def class_name(cls: type) -> str:
    """Returns a class's qualified name: "transformers.models.gpt2.modeling_gpt2.GPT2Block"."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register_block(block: "type[nn.Module] | str", spec: BlockSpec) -> None:
    """Register a class of blocks: a stack of them is parallelized whole, in its own code.

    Example:
        >>> up = ProjectionGroup("", ("up",))
        >>> register_block(Block, BlockSpec(streams=("x",), projections=(up,), row_parallel=("down",)))

    Args:
        block: the class, or its qualified name, as "my_package.models.Block". Subclasses don't count.
        spec: describes it.
    """
    _BLOCKS[block if isinstance(block, str) else class_name(block)] = spec


def block_spec(block: "nn.Module") -> BlockSpec | None:
    """Returns the spec of a block if exactly its class is registered."""
    return _BLOCKS.get(class_name(type(block)))


def _torch_layer(*streams: str, **options: Any) -> BlockSpec:
    """Norms in front or behind, batch or sequence first."""
    return BlockSpec(
        streams=streams,
        projections=(ProjectionGroup("", ("linear1",)),),
        row_parallel=("linear2",),
        batch_first=attrgetter("self_attn.batch_first"),
        elementwise_functions=("activation",),
        **options,
    )


_TORCH_ENCODER = _torch_layer(
    "src",
    masks=("src_mask",),
    overrides={"activation_relu_or_gelu": 0},  # the fused kernel of evaluation reads all weights itself
)

_GPT2_ATTENTION = ProjectionGroup(
    "attn", ("c_attn",), head_size="head_dim", num_fused=3, sharded_counts=("split_size",), dropout="attn_dropout.p"
)

_BERT_ATTENTION = ProjectionGroup(
    "attention.self",
    ("query", "key", "value"),
    input="hidden_states",
    head_size="attention_head_size",
    dropout="dropout.p",
)

_GPT2 = BlockSpec(
    streams=("hidden_states",),
    projections=(_GPT2_ATTENTION, ProjectionGroup("mlp", ("c_fc",))),
    row_parallel=("attn.c_proj", "mlp.c_proj"),
    elementwise_functions=("mlp.act",),
)

_BERT = BlockSpec(
    streams=("hidden_states",),
    projections=(_BERT_ATTENTION, ProjectionGroup("intermediate", ("dense",))),
    row_parallel=("attention.output.dense", "output.dense"),
    elementwise_functions=("intermediate.intermediate_act_fn",),
    required_values={"chunk_size_feed_forward": 0},
)


def _llama(replicated_norms: tuple[str, ...] = ()) -> BlockSpec:
    """RMSNorms in front, a gated MLP, k and v with fewer heads than q."""
    attention = ProjectionGroup(
        "self_attn",
        ("q_proj", "k_proj", "v_proj"),
        input="hidden_states",
        head_size="head_dim",
        replicated_norms=replicated_norms,
        dropout="attention_dropout",
    )
    return BlockSpec(
        streams=("hidden_states",),
        projections=(attention, ProjectionGroup("mlp", ("gate_proj", "up_proj"), input="x")),
        row_parallel=("self_attn.o_proj", "mlp.down_proj"),
        elementwise_functions=("mlp.act_fn",),
    )


_LLAMA_LIKE = ("llama.modeling_llama.Llama", "mistral.modeling_mistral.Mistral", "qwen2.modeling_qwen2.Qwen2")
_QWEN3 = "qwen3.modeling_qwen3.Qwen3"

RMS_NORMS = tuple(f"transformers.models.{name}RMSNorm" for name in (*_LLAMA_LIKE, _QWEN3))
"""Hugging Face's: they compute the same, each in a class of its own"""

_BLOCKS = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": _TORCH_ENCODER,
    "torch.nn.modules.transformer.TransformerDecoderLayer": _torch_layer(
        "tgt", "memory", masks=("tgt_mask", "memory_mask")
    ),
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _GPT2,
    "transformers.models.bert.modeling_bert.BertLayer": _BERT,
    **{f"transformers.models.{name}DecoderLayer": _llama() for name in _LLAMA_LIKE},
    f"transformers.models.{_QWEN3}DecoderLayer": _llama(replicated_norms=("q_norm", "k_norm")),
}
