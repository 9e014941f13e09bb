"""Embedding and head outside the stack, whose rows a cube's ranks share also while a batch runs.

All ranks run the step on the same samples, and each of their losses counts 1/ranks: gradients are terms of a sum.

ids [...]        --own rows, 0 for others-->  [..., H]  --all-reduce-->  [..., H]         F.embedding
                 <--------own rows----------            <--all-reduce--  terms
hidden [N, H]    --own logits [chunk, V/n], two numbers per token gathered-->  losses [N]  chunked_cross_entropy
hidden [..., H]  --own logits-->  [..., V/n]  --all-gather-->  [..., V]                    F.linear, without gradients

Whatever else code computes with such a weight gathers the whole for this one use, and sums its gradient.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_hanayo.chunked_loss.token_shares import HeldByRows, OwnRows
from lightning_hanayo.linear_modules import as_autocast, has_gradient_hooks
from lightning_hanayo.partial_values import PartialParameter, PartialValues, plain_alias
from lightning_hanayo.tensor_parallel.collectives import padded
from lightning_hanayo.tensor_parallel.on_use import OnUse, alias, compute_on_whole


def vocabulary_weights(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The weights of embeddings and linear layers with a row for each entry of the vocabulary, the largest embedding's.

    Left out are those of compiled modules, which don't ask how a weight is held, and those with hooks.
    """
    own = list(modules)
    layers = [one for one in own if isinstance(one, nn.Embedding | nn.Linear)]
    sizes = {id(one): one.num_embeddings if isinstance(one, nn.Embedding) else one.out_features for one in layers}
    vocabulary = max((sizes[id(one)] for one in layers if isinstance(one, nn.Embedding)), default=0)
    is_compiled = (one for one in own if one._compiled_call_impl is not None or "_orig_mod" in one._modules)
    left_out = {parameter for one in is_compiled for parameter in one.parameters()}
    left_out |= {
        parameter
        for one in layers
        for parameter in one.parameters(recurse=False)
        if isinstance(one, nn.Embedding) and (one.max_norm is not None or one.scale_grad_by_freq or one.sparse)
    }
    found = dict.fromkeys(one._parameters.get("weight") for one in layers if sizes[id(one)] == vocabulary)
    return [
        weight
        for weight in found
        if weight is not None
        and type(weight) in (nn.Parameter, FakeTensor)
        and weight not in left_out
        and not has_gradient_hooks(weight)
    ]


class _OfVocabulary(HeldByRows, OnUse):
    """The base class of both."""

    @override
    def own_rows(self) -> OwnRows | None:
        if self._source is None:
            return None
        mesh, of_rows = self._source.mesh, self._source.shard.dims[0]
        start, stop = of_rows.span(mesh)
        leaf = self if self._parameter is None else self._parameter
        return OwnRows(mesh.axis("xyz"), leaf, start, stop - start, of_rows.size)

    @override
    def kept(self) -> Tensor:
        parameter: Any = self if self._parameter is None else self._parameter
        return self if self._source is None else alias(self, parameter, self._source, VocabularyValues)

    @staticmethod
    @override
    def compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` with this rank's rows if it is known; else on the whole."""
        own = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _OfVocabulary))
        rows = own.own_rows()
        if rows is None:  # it is whole, in a dry run
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_weight = len(args) > 1 and args[1] is own
        if func is functional.embedding and is_weight:
            padding, special = kwargs.get("padding_idx"), ("max_norm", "scale_grad_by_freq", "sparse")
            if not any(kwargs.get(name) for name in special):
                padding = None if padding is None else padding % rows.size
                return _Lookup.apply(rows.part, args[0], rows, padding)
        if func is functional.linear and is_weight and not torch.is_grad_enabled():
            return _logits(args[0], rows, *args[2:], **kwargs)
        return compute_on_whole(func, args, kwargs)


class VocabularyWeight(_OfVocabulary, PartialParameter):
    """A parameter while a step runs: it has this class only then."""


class VocabularyValues(_OfVocabulary, PartialValues):
    """The same parameter where it has its own class, for logits that are made later."""


class _Lookup(torch.autograd.Function):
    """[V/n, H] and ids [...] to [..., H]."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ids: Tensor, rows: OwnRows, padding: int | None) -> Tensor:
        ctx.rows, ctx.padding = rows, padding
        ctx.save_for_backward(ids)
        own, is_own = rows.find(ids)
        part = plain_alias(part)
        found = functional.embedding(own, part if len(part) else part.new_zeros(1, part.shape[1]))
        return rows.ranks.all_reduce(found.masked_fill_(~is_own.unsqueeze(-1), 0)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows: OwnRows = ctx.rows
        gradient = rows.ranks.all_reduce(gradient.clone(memory_format=torch.contiguous_format)).wait()
        (ids,) = ctx.saved_tensors
        own, is_own = rows.find(ids)
        if ctx.padding is not None:
            is_own = is_own & (ids != ctx.padding)
        last = rows.num_rows  # takes the gradients of other rows, and is dropped
        own = own.where(is_own, last)
        return torch.ops.aten.embedding_dense_backward(gradient, own, last + 1, last, False)[:last], None, None, None


def _logits(hidden: Tensor, rows: OwnRows, bias: Tensor | None = None) -> Tensor:
    """[..., H] to [..., V], of own columns and those of other ranks."""
    hidden = as_autocast(hidden)
    own = functional.linear(hidden, plain_alias(rows.part).to(hidden.dtype))
    columns = padded(own.movedim(-1, 0), 0, -(-rows.size // rows.ranks.size))
    logits = rows.ranks.all_gather(columns).wait().flatten(0, 1)[: rows.size].movedim(0, -1)
    return logits if bias is None else logits + bias.to(logits.dtype)
