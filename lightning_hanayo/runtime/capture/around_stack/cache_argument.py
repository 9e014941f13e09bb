"""What a block on another rank gets of a key/value cache of transformers: the layers of it that the block uses.

    cache before the stack   [k0, v0] [k1, v1] [k2, v2] [k3, v3]     made by a prefix encoder
    block 2 gets                               [k2, v2]              None, if they are empty: it only would fill them
    cache after the stack    filled   filled   x        x            x: reading it is an error

Blocks fill their layers where they run, and these stay there: a cache lives inside one forward.
"""

import copy
from typing import Any, NoReturn

from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.capture.proxy import Valueless, user_line


class FilledElsewhere(Valueless):
    """A layer of a cache that a block on another rank fills."""

    __slots__ = ("index",)
    index: int

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"FilledElsewhere({self.index})"

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for code that uses the layer again."""
        raise UnsupportedError(
            f"{user_line()} uses layer {self.index} of a key/value cache ({operation}), which a block on another rank "
            f"has filled. A cache lives inside one forward: pass use_cache=False to the model, also to generate; or, "
            f"where the step itself makes a cache, a new one to each call."
        )


def cache_for(block: nn.Module, cache: Any) -> Any:
    """A cache with the layers that `block` uses, by the `layer_idx` of its modules; None if there is nothing in them.

    In the cache itself these layers can't be used any more.

    Raises:
        UnsupportedError: another forward has used the cache.
    """
    indices = (vars(part).get("layer_idx") for part in block.modules())
    own = {index for index in indices if isinstance(index, int)}
    found = _with_layers(cache, own)
    return found if _holds_values(found) else None


def _with_layers(cache: Any, own: set[int]) -> Any:
    """A copy with these layers (all, if none is named), also of the caches in it."""
    copied = copy.copy(cache)
    for name, value in vars(cache).items():
        if name == "layers":
            vars(copied)[name] = [layer if i in own or not own else None for i, layer in enumerate(value)]
            _mark(value, own)
        elif hasattr(value, "layers"):
            vars(copied)[name] = _with_layers(value, own)
    return copied


def _mark(layers: list[Any], own: set[int]) -> None:
    for index in own:
        layers.extend(FilledElsewhere(i) for i in range(len(layers), index + 1))
        layers[index] = FilledElsewhere(index)


def _holds_values(value: Any) -> bool:
    match value:
        case FilledElsewhere():
            value.refuse("update")
        case Tensor():
            return value.numel() > 0
        case list() | tuple():
            return any(map(_holds_values, value))
        case dict():
            return any(map(_holds_values, value.values()))
        case _:
            return hasattr(value, "__dict__") and not isinstance(value, type) and _holds_values(vars(value))
