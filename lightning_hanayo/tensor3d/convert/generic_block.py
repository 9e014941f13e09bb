"""Converts a block whose class isn't registered: each linear layer by itself, and its dropouts' random streams.

The code of the block isn't parallelized: each rank passes its own tokens to a linear layer, and gets them back, whole.

own tokens [m, K]  --all-to-all over z-->  [z, m, K/z]  --product-->  [y, m, N/y]  --all-to-all over y-->  [m, N]

The product all-gathers over y on dim 1 and reduce-scatters over z on dim 0, so that tokens return to the rank they
belong to. With both on one dimension they would return with y and z exchanged. Ranks may have different numbers of
tokens: all pad theirs to the largest. Where tokens are few compared with features, only the weight is communicated:

own tokens [m, K]  --product with the whole W, of which each rank stores [N/(x y z), K]-->  own tokens [m, N]
"""

from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.divisibility import Divisibility, MeshSizes
from lightning_hanayo.linear_modules import as_autocast, is_linear
from lightning_hanayo.tensor3d.collectives import all_to_all, padded, split_dim
from lightning_hanayo.tensor3d.convert.eligibility import ParameterOwners, reason_ineligible
from lightning_hanayo.tensor3d.convert.report import NOT_CONVERTED, ReportRow, describe
from lightning_hanayo.tensor3d.convert.whole_parameters import give_whole_parameters, whole_on_use
from lightning_hanayo.tensor3d.layers.dropout import parallelize_dropout
from lightning_hanayo.tensor3d.layers.linear import LinearSharding, ShardedLinear, features
from lightning_hanayo.tensor3d.layers.sharded_product import ShardedProduct
from lightning_hanayo.tensor3d.parallel_style import EXCHANGED_TOKENS, ParallelStyle
from lightning_hanayo.tensor3d.sharded_weight import ShardedWeight
from lightning_hanayo.tensor3d.sharding import DimShard, Shard
from lightning_hanayo.tensor3d.stage_context import StageContext

Communicated = Literal["activations", "weight"]
"""what ranks send each other: activations, and parts of the weight; or the weight alone"""

_OUTCOMES: dict[Communicated, str] = {
    "activations": "3-D, activations exchanged around it",
    "weight": "weight sharded over all ranks, gathered whole",
}


class GenericBlock:
    """Block `number` of a stack, on a mesh of these `sizes`. `tokens` estimates how many a micro-batch has."""

    def __init__(self, block: nn.Module, number: int, owners: ParameterOwners, sizes: MeshSizes, tokens: int) -> None:
        self.block = block
        self.number = number
        self._reasons: dict[str, str] = {}
        self._communicated: dict[str, Communicated] = {}
        for path, module in block.named_modules():
            if is_linear(module) and (reason := reason_ineligible(module, owners)) is None:
                self._communicated[path] = cheapest(features(module), tokens, sizes)
            elif is_linear(module):
                self._reasons[path] = str(reason)
            elif any(parameter is not None for parameter in module._parameters.values()):
                self._reasons[path] = "a subclass" if isinstance(module, nn.Linear) else "no linear layer"

    def products(self) -> Iterator[tuple[tuple[str, ...], bool]]:
        """Yields the linear layers that are converted, by their paths in the block; none is row-parallel."""
        yield from (((path,), False) for path in self._communicated)

    def divisibility(self) -> Iterator[Divisibility]:
        """What must divide over the mesh: nothing, since what doesn't is padded."""
        yield from ()

    def report_rows(self) -> Iterator[ReportRow]:
        """What becomes of each module with parameters, and of dropouts."""
        for path, module in self.block.named_modules():
            if path in self._communicated:
                yield ReportRow(self.number, path, describe(module), _OUTCOMES[self._communicated[path]])
            elif path in self._reasons:
                yield ReportRow(self.number, path, describe(module), NOT_CONVERTED, self._reasons[path])
            elif type(module) is nn.Dropout:
                yield ReportRow(self.number, path, describe(module), "random stream of each rank")

    def install(self, context: StageContext) -> None:
        """Convert what can be, in place."""
        for path, communicated in self._communicated.items():
            parallelize_generic_linear(self.block.get_submodule(path), context, communicated)
        for module in self.block.modules():
            if type(module) is nn.Dropout:
                parallelize_dropout(module, context)
        if any(self._communicated):  # not where the block is a linear layer itself, whose path is empty
            give_whole_parameters(self.block, context)


class _CalledByUserCode(LinearSharding):
    """A layer in code that knows nothing of the mesh, so that ranks might call other layers than each other."""

    @override
    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        self.number = self.context.call_order.add(module)

    @override
    def parameter(self, module: ShardedLinear, name: str) -> Tensor | None:
        return whole_on_use(module, name)


class _ExchangedActivations(_CalledByUserCode):
    """A layer whose activations are exchanged before and after its product."""

    @override
    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        own = as_autocast(x).flatten(0, -2)
        (y_axis, z_axis), out = (self.context.mesh.axis(name) for name in "yz"), self.matrix.shape[0]
        # Ranks ask each other each time: the numbers may differ for reasons that only the surrounding code knows.
        most = self.context.call_order.check(self.number, own.shape[0])
        columns = all_to_all(split_dim(padded(own, 0, most), z_axis.size, 1), z_axis)
        y = super().forward(columns, None if bias is None else padded(bias, 0, self.gathered_shape[0]))
        tokens = all_to_all(y[0].unflatten(0, (y_axis.size, most)), y_axis).movedim(0, 1).flatten(1)
        return tokens[: own.shape[0], :out].reshape(*x.shape[:-1], out)


class _GatheredWeight(_CalledByUserCode):
    """A layer whose weight is sharded over all ranks by its out-features, and gathered whole for each call."""

    weight_axis = "xyz"

    def __init__(self, context: StageContext, style: ParallelStyle, sizes: tuple[int, int]) -> None:
        super().__init__(context, style, sizes)
        out, in_ = self.gathered_shape = sizes
        self.matrix = Shard((DimShard(out, "xyz", as_one=True), DimShard(in_)))
        self.vector = Shard((DimShard(out),), "xyz")

    @override
    def _new_product(self, weight: ShardedWeight) -> ShardedProduct:
        return ShardedProduct(weight, self.context, None, None)

    @override
    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self.product is not None
        self.context.call_order.check(self.number)
        y = self.product(x)[1]
        return y if bias is None else y + bias.to(y.dtype)


def parallelize_generic_linear(module: nn.Module, context: StageContext, communicated: Communicated) -> None:
    """Parallelize an `nn.Linear` or a `Conv1D` in place, for code that knows nothing of the mesh.

    All ranks of the mesh call it in the same order, each with tokens of its own, or with none.
    """
    sharding = _ExchangedActivations if communicated == "activations" else _GatheredWeight
    sharding(context, EXCHANGED_TOKENS, features(module)).attach(module)


def cheapest(sizes: tuple[int, int], tokens: int, mesh: MeshSizes) -> Communicated:
    """Returns what to communicate, by the elements that each rank receives in a forward and a backward.

    M tokens [M, K] times W [N, K], P = x y z ranks:
    activations    2 [(y-1) M K + (x-1) K N + (z-1) M N + (1 - 1/z) M K + (1 - 1/y) M N] / P
    weight         2 (P-1) K N / P
    """
    (n, k), (x, y, z) = sizes, mesh
    activations = (y - 1 / z) * tokens * k + (x - 1) * k * n + (z - 1 / y) * tokens * n
    return "weight" if (x * y * z - 1) * k * n <= activations else "activations"
