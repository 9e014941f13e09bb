"""Lets causal models of transformers compute their loss chunk by chunk of tokens, unchanged.

    hidden -> lm_head -> logits -> loss_function(logits, labels)        the model's forward
              |          |         `-- takes hidden and weight from the logits, if they haven't been made
              |          `-- a tensor that makes its values when something computes with them
              `-- its forward, which `chunk_loss` replaces on the instance

So `outputs.logits` is there for whoever asks for it, in the usual memory.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional
from torch.utils._pytree import tree_map

from lightning_hanayo.chunked_loss.cross_entropy import CHUNK, check_chunk, chunked_cross_entropy
from lightning_hanayo.chunked_loss.token_shares import HeldByRows
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.partial_values import METADATA, OF_DEVICE, OF_OBJECT, name_of

_WITHOUT_VALUES = METADATA - OF_DEVICE - OF_OBJECT
_LOSS = "ForCausalLMLoss"


def chunk_loss(model: nn.Module, chunk: int = CHUNK) -> nn.Module:
    """Let a causal model of transformers compute its loss without whole logits: with `labels` among its arguments.

    Call it where the model is built. Its head stays an `nn.Linear` with the same weight, also a tied one.

    Example:
        >>> self.model = chunk_loss(LlamaForCausalLM(config))
        >>> loss = self.model(input_ids=ids, labels=ids).loss

    Args:
        model: such as `LlamaForCausalLM` or `GPT2LMHeadModel`.
        chunk: for how many tokens logits are made at a time.

    Returns:
        The model itself.

    Raises:
        HanayoError: a bad number.
        UnsupportedError: the model has no linear head, or a loss of its own.
    """
    check_chunk(chunk)
    head, loss = _head_and_loss(model)
    if not _is_causal(head, loss) or "forward" in vars(head):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise UnsupportedError(
            f"chunk_loss: {type(model).__name__} has the head {type(head).__name__} and the loss {name}; expected "
            f"nn.Linear and {_LOSS}. Call lightning_hanayo.chunked_cross_entropy in your step instead."
        )
    _chunk_loss(head, model, loss, chunk, object.__setattr__)
    return model


def has_causal_models(module: nn.Module) -> bool:
    """Whether `chunk_losses` knows a model in the module, or `chunk_loss` has changed one."""
    return any(_is_causal(*_head_and_loss(part)) for part in module.modules())


def chunk_losses(module: nn.Module, set_attribute: Callable[[Any, str, Any], None], chunk: int = CHUNK) -> None:
    """Let all causal models of transformers in a module compute their losses without whole logits.

    Args:
        module: whose other models stay as they are, and those that `chunk_loss` has changed.
        set_attribute: sets an attribute of an instance, and may take it back later.
        chunk: for how many tokens logits are made at a time.
    """
    for part in module.modules():
        head, loss = _head_and_loss(part)
        if _is_causal(head, loss) and "forward" not in vars(head):
            _chunk_loss(head, part, loss, chunk, set_attribute)


def _head_and_loss(model: nn.Module) -> tuple[Any, Any]:
    """The head of a model of transformers, and its loss function; None for a missing one.

    A wrapper may pass on both of the model inside it, and isn't such a model.
    """
    if not hasattr(type(model), "get_output_embeddings"):
        return None, None
    head = model.get_output_embeddings()  # type: ignore[operator]
    return head, None if head is None else getattr(model, "loss_function", None)


def _is_causal(head: Any, loss: Any) -> bool:
    return type(head) is nn.Linear and getattr(loss, "__name__", "") == _LOSS


def _chunk_loss(
    head: nn.Linear, model: nn.Module, loss: Any, chunk: int, set_attribute: Callable[[Any, str, Any], None]
) -> None:
    set_attribute(head, "forward", MethodType(forward, head))
    set_attribute(model, "loss_function", ChunkedLoss(loss, chunk))


def forward(head: nn.Linear, input: Tensor) -> Tensor:
    """Takes the place of the head's forward. A function of this module, so that pickle finds it by name."""
    return Logits.of(input, head.weight, head.bias)


class Logits(Tensor):
    """The output of a head: `linear(hidden, weight, bias)`, made when something computes with it."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    _whole: Tensor | None = None

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "Logits":
        """Logits [..., V] of [..., H] and [V, H]."""
        shape, dtype = (*hidden.shape[:-1], weight.shape[0]), as_autocast(hidden).dtype
        with unset_fake_temporarily():  # while a plan counts operations: a fake tensor can be of no other class
            made: Logits = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Logits)
        made.hidden, made.bias = hidden, bias
        made.weight = weight.kept() if isinstance(weight, HeldByRows) else weight
        return made

    @property
    def is_made(self) -> bool:
        """Whether something has computed with the values."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """The values, made once."""
        if self._whole is None:
            self._whole = functional.linear(self.hidden, self.weight, self.bias)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read attributes that need no values; compute with the values otherwise."""
        name = name_of(func, args, kwargs)
        if name in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "device":
            return args[0].hidden.device
        if name == "contiguous" and len(args) == 1 and not kwargs:  # some models call this before the loss
            return args[0]
        args, kwargs = tree_map(_made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Describe it."""
        return f"Logits({tuple(self.shape)}, made when they are used)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Becomes a plain tensor when it is copied or pickled."""
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """As for pickle."""
        return self.whole().detach().clone()


def _made(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, Logits) else leaf


class ChunkedLoss:
    """Takes the place of a model's `loss_function`."""

    def __init__(self, original: Callable[..., Tensor], chunk: int) -> None:
        self.original = original
        self.chunk = chunk
        self.__name__ = original.__name__

    def __call__(
        self, logits: Tensor, labels: Tensor | None = None, vocab_size: int | None = None, **given: Any
    ) -> Tensor:
        """The mean over the labels that count, or their sum divided by `num_items_in_batch`."""
        if not isinstance(logits, Logits) or logits.is_made or vocab_size not in (None, logits.weight.shape[0]):
            return self.original(_made(logits), labels, vocab_size, **given)
        ignore_index, count = given.get("ignore_index", -100), given.get("num_items_in_batch")
        if (shift_labels := given.get("shift_labels")) is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = chunked_cross_entropy(
            logits.hidden,
            logits.weight,
            shift_labels.to(logits.hidden.device),
            logits.bias,
            chunk=self.chunk,
            ignore_index=ignore_index,
            reduction="mean" if count is None else "sum",
        )
        return loss if count is None else loss / count
