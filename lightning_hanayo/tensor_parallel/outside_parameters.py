"""Parameters that no 3-D layer holds: sharded over the whole cube between batches, whole during one.

between batches    [rows/(x y z), ...] on each rank: values, gradient, optimizer state
all_gather         whole values, from before the first micro-batch ...
reduce_scatter     ... until after the last backward: each rank gets its shard of the gradients' sum over the cube

They are the embedding, the head, and in generic blocks whatever isn't converted. The collectives run before and after a
batch, so the user's code needs none. The `Parameter` objects stay, so ties and names hold. Of those that are
`kept_sharded` there are never whole values, but in dry runs: see `outside_vocabulary`.

bytes, besides the shards    before the batch    whole values, and copies of one bucket
                             during it           whole values, whole gradients
                             after it            whole gradients, copies of one bucket; freed bucket by bucket

A bucket is one large parameter, or several small ones. Those whose rows don't divide are copied.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod

import torch
from torch import Tensor, nn

from lightning_hanayo.tensor_parallel.collectives import padded, split_dim
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.on_use import Source
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
        """those that stay sharded while a batch runs: see `outside_vocabulary`"""
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
