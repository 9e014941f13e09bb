"""Parameters that no 3-D layer holds: sharded over the whole cube between batches, whole during one.

between batches    [rows/(x y z), ...] on each rank: values, gradient, optimizer state
all_gather         whole values, from before the first micro-batch ...
reduce_scatter     ... until after the last backward: each rank gets its shard of the gradients' sum over the cube

They are the embedding, the head, and in generic blocks whatever isn't converted. The collectives run before and after a
batch, so the user's code needs none. The `Parameter` objects stay, so ties and names hold. Of those that are
`kept_sharded` there are never whole values, but in dry runs: see below.

bytes, besides the shards    before the batch    whole values, and copies of one bucket
                             during it           whole values, whole gradients
                             after it            whole gradients, copies of one bucket; freed bucket by bucket

A bucket is one large parameter, or several small ones. Those whose rows don't divide are copied.

Embedding and head outside the stack, whose rows a cube's ranks share also while a batch runs.

All ranks run the step on the same samples, and each of their losses counts 1/ranks: gradients are terms of a sum.

ids [...]        --own rows, 0 for others-->  [..., H]  --all-reduce-->  [..., H]         F.embedding
                 <--------own rows----------            <--all-reduce--  terms
hidden [N, H]    --own logits [chunk, V/n], two numbers per token gathered-->  losses [N]  chunked_cross_entropy
hidden [..., H]  --own logits-->  [..., V/n]  --all-gather-->  [..., V]                    F.linear, without gradients

Whatever else code computes with such a weight gathers the whole for this one use, and sums its gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_hanayo.chunked_loss.token_shares import HeldByRows, OwnRows
from lightning_hanayo.linear_modules import as_autocast, has_gradient_hooks
from lightning_hanayo.partial_values import PartialParameter, PartialValues, plain_alias
from lightning_hanayo.tensor_parallel.collectives import padded, run, split_dim
from lightning_hanayo.tensor_parallel.mesh import Mesh, Pending
from lightning_hanayo.tensor_parallel.on_use import OnUse, Source, alias, compute_on_whole
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard
from lightning_hanayo.weight_gradients import gradient_dtype

BUCKET_BYTES = 2**25
"""how much of whole parameters one collective takes together; a larger parameter has one of its own"""


class OutsideParameters:
    """Those of all stages of one rank in the cube `mesh`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._axis = mesh.axis("xyz")
        self.parameters: list[nn.Parameter] = []
        self.shards: dict[Tensor, Shard] = {}
        self.kept_sharded: set[nn.Parameter] = set()
        """those that stay sharded while a batch runs, such as embedding and head"""
        self._old_gradients: dict[nn.Parameter, Tensor | None] = {}
        self._local: dict[nn.Parameter, Tensor] = {}

    def shard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add parameters that are whole, and keep this rank's shards of them. Called by all ranks of the cube.

        `parameters` are in the same order on all ranks. Scalars can't be sharded, and are left out.
        """
        added = [parameter for parameter in parameters if parameter.dim()]
        self.parameters += added
        for parameter in added:
            first, *rest = parameter.shape
            shard = self.shards[parameter] = Shard((DimShard(first, "xyz", as_one=True), *map(DimShard, rest)))
            parameter.data = shard.of(parameter.data, self._mesh)

    def all_gather(self, *, everything: bool = False) -> None:
        """Before a batch: whole values, and no gradients. Earlier batches' gradients are kept for `reduce_scatter`.

        `everything`: also of those that stay sharded, for dry runs.
        """
        self._old_gradients = {parameter: parameter.grad for parameter in self.parameters}
        for parameter in () if everything else self.kept_sharded:
            vars(parameter)["_source"] = Source(self._mesh, self.shards[parameter])
            parameter.grad = None
        chosen = [one for one in self.parameters if everything or one not in self.kept_sharded]
        for bucket in self._buckets(chosen):
            parts = [padded(p.data, 0, -(-self.shards[p].shape[0] // self._axis.size)) for p in bucket]
            wholes = [part.new_empty(self._axis.size * len(part), *part.shape[1:]) for part in parts]
            self._axis.gather_into(wholes, parts).wait()
            for parameter, whole in zip(bucket, wholes, strict=True):
                self._local[parameter] = parameter.data
                parameter.grad = None
                parameter.data = whole[: self.shards[parameter].shape[0]]

    def is_whole(self, parameter: Tensor) -> bool:
        """Whether a batch is running, for which this parameter was gathered."""
        return parameter in self._local

    def check_steps(self) -> None:
        """When code of a step has run, and may have changed a parameter that stays sharded.

        Raises:
            UnsupportedError: by way of a view of the whole, which was gathered for it.
        """
        for parameter in self.kept_sharded:
            if (source := vars(parameter).get("_source")) is not None:
                source.check(parameter, "")

    def reduce_scatter(self) -> None:
        """After a batch: this rank's shards again, of values and of the gradients' sums."""
        used = [0] * len(self.parameters)
        if self.parameters and torch.is_grad_enabled():  # a parameter that no rank used gets no gradient
            used = self._mesh.largest([parameter.grad is not None for parameter in self.parameters])
        gradients = {parameter: parameter.grad for parameter in self.parameters}
        for parameter in self.parameters:  # whole values go before the gradients are copied
            parameter.grad = None
            parameter.data = self._local.get(parameter, parameter.data)
        sums = {p: gradients[p] for p in self.parameters if p not in self._local}
        summed = [p for p, is_used in zip(self.parameters, used, strict=True) if is_used and p in self._local]
        for bucket in self._buckets(summed):
            self._add(zip(bucket, self._sums(bucket, gradients), strict=True))
        self._add(sums.items())
        self._end(self._old_gradients)

    def discard(self, *, keeps_gradients: bool = False) -> None:
        """Without a batch, or after a failure: this rank's shards again, and no gradients, or those of before."""
        for parameter in self._old_gradients:
            parameter.grad = None
            parameter.data = self._local.get(parameter, parameter.data)
        self._end(self._old_gradients if keeps_gradients else {})

    def _add(self, gradients: Iterable[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Add this rank's shards of sums to those of earlier batches."""
        for parameter, gradient in gradients:
            old = self._old_gradients[parameter]
            if old is None or gradient is None:
                self._old_gradients[parameter] = gradient if old is None else old
            else:
                old.add_(gradient)

    def _end(self, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        for parameter, total in gradients.items():
            parameter.grad = total
        for parameter in self.kept_sharded:
            vars(parameter).pop("_source", None)
        self._old_gradients, self._local = {}, {}

    def _sums(self, bucket: Sequence[nn.Parameter], gradients: dict[nn.Parameter, Tensor | None]) -> Iterator[Tensor]:
        """Yields this rank's shards of the sums over the cube. Takes the whole gradients out of `gradients`."""
        size, rows = self._axis.size, []
        for parameter in bucket:
            gradient = gradients.pop(parameter)
            if gradient is None:
                gradient = parameter.new_zeros(self.shards[parameter].shape, dtype=gradient_dtype(parameter))
            rows.append(split_dim(gradient, size, 0))
            del gradient
        pending = self._axis.reduce_scatter_each(rows)
        rows.clear()
        for parameter, total in zip(bucket, pending.wait(), strict=True):
            yield total[: len(self._local[parameter])]

    def _buckets(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yields parameters of one dtype that share a collective: the same on all ranks."""
        for _, same in groupby(sorted(parameters, key=lambda p: str(p.dtype)), key=lambda p: p.dtype):
            bucket: list[nn.Parameter] = []
            room = BUCKET_BYTES
            for parameter in same:
                num_bytes = prod(self.shards[parameter].shape) * parameter.itemsize
                if bucket and num_bytes > room:
                    yield bucket
                    bucket, room = [], BUCKET_BYTES
                bucket.append(parameter)
                room -= num_bytes
            if bucket:
                yield bucket


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
                return _look_up(args[0], rows, None if padding is None else padding % rows.size)
        if func is functional.linear and is_weight and not torch.is_grad_enabled():
            return _logits(args[0], rows, *args[2:], **kwargs)
        return compute_on_whole(func, args, kwargs)


class VocabularyWeight(_OfVocabulary, PartialParameter):
    """A parameter while a step runs: it has this class only then."""


class VocabularyValues(_OfVocabulary, PartialValues):
    """The same parameter where it has its own class, for logits that are made later."""


def _look_up(ids: Tensor, rows: OwnRows, padding: int | None) -> Tensor:
    """Ids [...] to [..., H], of own rows and those of other ranks."""

    def start_sum(x: Tensor) -> Pending[Tensor]:
        return rows.ranks.all_reduce(x.clone(memory_format=torch.contiguous_format))

    with torch._C.DisableTorchFunctionSubclass():  # the weight is a part here
        return run(rows.look_up(ids, padding), rows.ranks, start_sum, start_sum)


def _logits(hidden: Tensor, rows: OwnRows, bias: Tensor | None = None) -> Tensor:
    """[..., H] to [..., V], of own columns and those of other ranks."""
    hidden = as_autocast(hidden)
    own = functional.linear(hidden, plain_alias(rows.part).to(hidden.dtype))
    columns = padded(own.movedim(-1, 0), 0, -(-rows.size // rows.ranks.size))
    logits = rows.ranks.all_gather(columns).wait().flatten(0, 1)[: rows.size].movedim(0, -1)
    return logits if bias is None else logits + bias.to(logits.dtype)
