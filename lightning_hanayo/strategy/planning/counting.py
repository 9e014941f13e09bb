"""Counts what a forward computes, reads, writes and keeps, by block, while it runs; tensors need no values."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_hanayo.linear_modules import is_linear

VIEWS = (
    "detach",
    "view",
    "_unsafe_view",
    "alias",
    "t",
    "transpose",
    "unsqueeze",
    "squeeze",
    "select",
    "slice",
    "split",
    "expand",
    "permute",
    "empty",
    "device",
)
"""operations that start no kernel, and cost the host little compared with those that do"""
GROUPED = ("_grouped_mm", "grouped_mm_fallback")
"""products of each expert's tokens with its own weight, by torch and by transformers; torch's counter lacks them"""

_SAME_FLOPS = {"_scaled_dot_product_flash_attention_for_cpu": torch.ops.aten._scaled_dot_product_flash_attention}
"""operations that torch's counter lacks, and others that compute the same"""


@dataclass
class Counts:
    """Of one block, or of all code outside the stack."""

    flops: float = 0.0
    traffic: float = 0.0
    """bytes that operations other than products read and write"""
    calls: int = 0
    saved: dict[int, int] = field(default_factory=dict)
    """bytes by storage of what autograd keeps"""
    largest: int = 0
    """bytes of the largest tensor that is made"""
    tokens: dict[str, int] = field(default_factory=dict)
    """rows of the input of each linear layer, by its path in the block"""
    output: int = 0
    """bytes that the block hands on"""
    shape: tuple[int, ...] = ()
    """of the largest tensor that it hands on"""

    def num_saved(self, without: set[int]) -> int:
        """Bytes that autograd keeps, without these storages."""
        return sum(size for storage, size in self.saved.items() if storage not in without)


class Counter(TorchDispatchMode):
    """Counts while it is active, for the block that runs."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.outside = Counts()
        self.blocks = [Counts() for _ in blocks]
        self._modules = blocks
        self._now = self.outside
        self._keeps: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count a forward in this context."""
        with ExitStack() as hooks:
            for block, counts in zip(self._modules, self.blocks, strict=True):
                self._watch(hooks, block, counts)
            hooks.enter_context(saved_tensors_hooks(self._keep, lambda tensor: tensor))
            hooks.enter_context(_FlashAttention())
            hooks.enter_context(self)
            yield

    def _watch(self, hooks: ExitStack, block: nn.Module, counts: Counts) -> None:
        def begin(*_: Any) -> None:
            self._now = counts

        def end(_: nn.Module, __: Any, output: Any) -> None:
            tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
            counts.output = sum(one.nbytes for one in tensors)
            counts.shape = tuple(max(tensors, key=Tensor.numel).shape) if tensors else ()
            self._now = self.outside

        hooks.enter_context(_removed(block.register_forward_pre_hook(begin)))
        hooks.enter_context(_removed(block.register_forward_hook(end)))
        for path, module in block.named_modules():
            if is_linear(module):
                hooks.enter_context(_removed(module.register_forward_hook(_row_counter(counts, path))))

    def _keep(self, tensor: Tensor) -> Tensor:
        self._keeps.append(tensor)  # so that no other storage gets its number
        storage = tensor.untyped_storage()
        self._now.saved[storage._cdata] = storage.nbytes()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        now, name = self._now, _SAME_FLOPS.get(func._opname, func._overloadpacket)
        now.largest = max([now.largest, *(one.nbytes for one in tree_leaves(result) if isinstance(one, Tensor))])
        if name in flop_registry:
            now.calls += 1
            now.flops += flop_registry[name](*args, **kwargs, out_val=result)
        elif func._opname in GROUPED:
            now.calls += 1
            now.flops += 2.0 * result.numel() * args[0].shape[-1]
        elif func._opname not in VIEWS:
            now.calls += 1
            tensors = tree_leaves((args, kwargs, result))
            now.traffic += sum(one.nbytes for one in tensors if isinstance(one, Tensor))
        return result


class _FlashAttention(TorchFunctionMode):
    """Has attention on the meta device do what it does on devices, where no matrix of all pairs of tokens is kept."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args and args[0].is_meta:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """[batch, heads, tokens, features] each."""
    if groups := q.shape[1] // k.shape[1] - 1:
        k, v = (one.repeat_interleave(groups + 1, 1) for one in (k, v))
    y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return y


def _row_counter(counts: Counts, path: str) -> Any:
    def count(module: Any, inputs: Any, _: Any) -> None:
        x = inputs[0]
        counts.tokens[path] = counts.tokens.get(path, 0) + x.numel() // x.shape[-1]

    return count


@contextmanager
def fake_tensors(module: nn.Module) -> Iterator[set[int]]:
    """In this context tensors on the meta device are `FakeTensor`s, as while a model is exported or compiled.

    Libraries know these, and then don't look at values: transformers doesn't ask whether a mask is all ones.

    Yields:
        The numbers of the storages of the module's parameters, here and outside.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before = log.disabled
    log.disabled = True  # it prints a traceback of an error that is raised, too
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            parameters = [mode.from_tensor(one) for one in module.parameters() if not _is_packed(one)]
            yield storages(list(module.parameters())) | {one.untyped_storage()._cdata for one in parameters}
    finally:
        log.disabled = before


@contextmanager
def _removed(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


def storages(tensors: Sequence[Tensor]) -> set[int]:
    """The numbers of their storages."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if not _is_packed(tensor)}


def _is_packed(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided
