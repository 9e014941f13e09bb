"""The product of a layer, or of several that read one input, with their sharded weights: alone, or in compiled code."""

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.tensor3d.compiled_ops import compiled_product, new_handle
from lightning_hanayo.tensor3d.parallel_style import AxisCollective
from lightning_hanayo.tensor3d.product import products
from lightning_hanayo.tensor3d.product_args import ProductArgs
from lightning_hanayo.tensor3d.sharded_weight import ShardedWeight
from lightning_hanayo.tensor3d.stage_context import StageContext


class ShardedProduct:
    """x W^T with each part of one weight.

    Args:
        weight: W.
        context: of the stage.
        all_gather: of the input; None: it is gathered already.
        reduce_scatter: of the outputs; None: they are no partial sums.
    """

    def __init__(
        self,
        weight: ShardedWeight,
        context: StageContext,
        all_gather: AxisCollective | None,
        reduce_scatter: AxisCollective | None,
    ) -> None:
        self.weight = weight
        self._context = context
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter
        size = context.mesh.size
        self._num_gathered = 1 if all_gather is None else size(all_gather.axis)
        self._num_scattered = 1 if reduce_scatter is None else size(reduce_scatter.axis)
        self._begin()

    def _begin(self) -> None:
        self._args: tuple[int | None, ProductArgs] | None = None
        self._handle = new_handle(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_args", "_handle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __deepcopy__(self, memo: Any) -> "ShardedProduct":
        twin = memo[id(self)] = copy(self)
        twin.weight = deepcopy(self.weight, memo)
        return twin

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the gathered x, and the product with each part. Called by all ranks, in the same order."""
        x = as_autocast(x)
        if torch.compiler.is_dynamo_compiling():
            return self._call_compiled(x)
        gathered, *outputs = products(x, self.args(), self.following())
        return (gathered if self._num_gathered > 1 else x), *outputs

    def args(self) -> ProductArgs:
        """How it runs now: for sequences of the length that the stage runs."""
        self._context.check_open()
        length = self._context.sequence_length
        if self._args is None or self._args[0] != length:
            bind = self._context.bind
            before, after = (None if one is None else bind(one) for one in (self._all_gather, self._reduce_scatter))
            self._args = (
                length,
                ProductArgs(
                    self.weight,
                    before,
                    after,
                    self._context.keep,
                    self._context.num_pieces,
                    has_empty_pieces=self._context.has_pairs,
                ),
            )
        return self._args[1]

    def following(self) -> Sequence[ShardedWeight]:
        """The weights to gather ahead. Called once per product."""
        return self._context.prefetch_order.record(self.weight)

    def _call_compiled(self, x: Tensor) -> tuple[Tensor, ...]:
        gathers, keeps, weight = self._num_gathered > 1, self._context.keep == "gathered", self.weight
        gathered = self._gathered_shape(x)
        outputs = [size for count in weight.sizes for size in self._output_shape(gathered, count)]
        rows = None
        if keeps and weight.is_gathered and not self._context.batch_weights.is_on:  # the graph may overwrite its own
            rows = [sum(weight.sizes)] if weight.is_one_matrix else weight.sizes
        results = compiled_product(x, self._handle, gathers, keeps, gathered, outputs, rows)
        return (results[0] if gathers else x), *results[int(gathers) : int(gathers) + len(weight.sizes)]

    def _gathered_shape(self, x: Tensor) -> list[int]:
        shape = list(x.shape)
        if self._all_gather is not None and self._num_gathered > 1:
            dim = self._all_gather.dim % x.dim()
            length = self._context.sequence_length if self._all_gather.is_sequence else None
            shape[dim] = shape[dim] * self._num_gathered if length is None else length
        return shape

    def _output_shape(self, gathered: list[int], features: int) -> list[int]:
        shape = [*gathered[:-1], features]
        if self._reduce_scatter is not None:
            dim = self._reduce_scatter.dim % len(shape)
            shape[dim] = -(-shape[dim] // self._num_scattered)
        return shape
