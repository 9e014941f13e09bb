"""The recipes' GPT and BERT, known by name alone: they know nothing of this package."""

from typing import Any

from lightning_hanayo.tensor3d.convert.specs.spec import BlockSpec, Part


def _head_size(attention: Any) -> int:
    return int(attention.qkv.in_features) // int(attention.num_heads)


_FUSED = Part("attention", ("qkv",), head_size=_head_size, fused=3, local=("num_heads",), dropout="dropout")
_SEPARATE = Part("attention", ("query", "key", "value"), input="x", head_size="head_size", dropout="dropout")

BLOCKS = {
    f"recipes.{name}.module.Block": BlockSpec(("x",), (attention, Part("", ("up",))), ("attention.out", "down"))
    for name, attention in {"gpt": _FUSED, "bert": _SEPARATE}.items()
}
