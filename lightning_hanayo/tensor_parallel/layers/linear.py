"""The 3-D parallel linear layer, in place of `nn.Linear` and of Hugging Face's `Conv1D`.

Several layers that read one input gather it once, and are one product:

x [batch/x, seq/y, K/z]  -->  [batch/x, seq, K/z] times (Wq, Wk, Wv)^T  -->  q, k, v [batch/x, seq, N/(y z)]

3-D parallel feed-forward networks: one linear layer up, or two that share their input, an activation, one down.

x [batch/x, seq/y, h/z]  --up-->  [batch/x, seq, n/(y z)]  --activation, dropout-->  --down-->  [batch/x, seq/y, h/z]

Between the linear layers each entry is computed from itself alone, so nothing is sent.
"""

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from lightning_hanayo.divisibility import Divisibility, check_divisibility
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.partial_values import OfPart, PartialParameter, partial_alias
from lightning_hanayo.tensor_parallel.compiled_ops import compiled_product, new_handle
from lightning_hanayo.tensor_parallel.layers.norm import Dropout3D
from lightning_hanayo.tensor_parallel.product import (
    NO_COLLECTIVE,
    SEQUENCE,
    AxisCollective,
    ParallelStyle,
    ProductArgs,
    products,
)
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard, shard_module, sharded_class
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from lightning_hanayo.tensor_parallel.weights import ShardedWeight, StoredWeight


def guarded_weight(module: Any, name: str = "weight") -> Tensor:
    """The getter of a 3-D layer's `weight`, or of another parameter.

    User code gets the parameter itself, which is guarded while user code runs; other code an alias.
    """
    parameter: Tensor | None = module._parameters.get(name)
    if parameter is None:
        raise AttributeError(f"{type(module).__name__} has no attribute {name!r}")
    if isinstance(parameter, PartialParameter) or "_shards" not in vars(module):  # until the constructor shards it
        return parameter
    return partial_alias(parameter, vars(parameter).get("_part")).requires_grad_(parameter.requires_grad)


@dataclass(eq=False)
class ShardedProduct:
    """x W^T with each part of one weight."""

    weight: ShardedWeight
    """W"""
    context: StageContext
    """of the stage"""
    all_gather: AxisCollective
    """of the input"""
    reduce_scatter: AxisCollective
    """of the outputs"""

    def __post_init__(self) -> None:
        size = self.context.mesh.size
        self._num_gathered, self._num_scattered = size(self.all_gather.axis), size(self.reduce_scatter.axis)
        self._handle = new_handle(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._handle = new_handle(self)

    def __deepcopy__(self, memo: Any) -> "ShardedProduct":
        twin = memo[id(self)] = copy(self)
        twin.weight = deepcopy(self.weight, memo)
        return twin

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the gathered x, and the product with each part. Called by all ranks, in the same order."""
        x = as_autocast(x)
        if torch.compiler.is_dynamo_compiling():
            return self._call_compiled(x)
        gathered, *outputs = products(x, self.args())
        return (gathered if self._num_gathered > 1 else x), *outputs

    def args(self) -> ProductArgs:
        """How it runs now: for sequences of the lengths that the stage runs."""
        context = self.context
        before, after = context.bind(self.all_gather), context.bind(self.reduce_scatter)
        return ProductArgs(self.weight, before, after, context.keep, context.num_pieces, context.has_pairs)

    def _call_compiled(self, x: Tensor) -> tuple[Tensor, ...]:
        gathers, keeps, weight = self._num_gathered > 1, self.context.keep == "gathered", self.weight
        parts, gathered = self.context.sequence_parts, list(x.shape)
        padded = () if parts is None else parts.padded  # a graph for each, and one for all lengths without padding
        if gathers:
            dim = self.all_gather.dim % x.dim()
            lengths = [length for size, length in padded if size == x.shape[dim]] if self.all_gather.is_sequence else []
            gathered[dim] = lengths[0] if lengths else gathered[dim] * self._num_gathered
        outputs: list[int] = []
        for features in weight.sizes:
            shape = [*gathered[:-1], features]
            dim = self.reduce_scatter.dim % len(shape)
            sizes = [size for size, length in padded if length == shape[dim]] if self.reduce_scatter.is_sequence else []
            shape[dim] = sizes[0] if sizes else -(-shape[dim] // self._num_scattered)
            outputs += shape
        rows = None
        if keeps and weight.is_gathered and not self.context.keeps_weights:  # the graph may overwrite its own
            rows = [sum(weight.sizes)] if weight.is_one_matrix else weight.sizes
        results = compiled_product(x, self._handle, gathers, keeps, gathered, outputs, rows)
        return (results[0] if gathers else x), *results[int(gathers) : int(gathers) + len(weight.sizes)]


@dataclass(eq=False)
class SharedInput:
    """The input of several linear layers of one module: gathered once, and multiplied with all their weights at once.

    The module's forward begins with `all_gather`. Each layer then finds its output ready, unless it is called with
    another input, after the input was changed in place, or a second time.
    """

    context: StageContext
    style: ParallelStyle
    _parts: list[StoredWeight] = field(default_factory=list, init=False)
    _product: ShardedProduct | None = field(default=None, init=False)
    _last: tuple[Tensor, int, dict[int, Tensor]] | None = field(default=None, init=False)

    def add(self, part: StoredWeight) -> int:
        """Returns the number of a layer with this weight."""
        self._parts.append(part)
        weight = self.context.weight(*self._parts)
        self._product = ShardedProduct(weight, self.context, self.style.all_gather, self.style.reduce_scatter)
        return len(self._parts) - 1

    def all_gather(self, x: Tensor) -> Tensor:
        """[.., n, ..] to the whole, without padding."""
        assert self._product is not None
        gathered, *outputs = self._product(x)
        if not torch.compiler.is_dynamo_compiling() and gathered.is_inference():
            with torch.inference_mode(False):
                gathered = gathered.clone()  # one whose version is counted
        self._last = gathered, _version(gathered), dict(enumerate(outputs))
        return gathered

    def output(self, x: Tensor, number: int) -> Tensor | None:
        """Returns the product of `x` with a layer's weight, if `x` was gathered last. Returned once only."""
        if self._last is None or self._last[0] is not x or self._last[1] != _version(x):
            return None
        return self._last[2].pop(number, None)

    def clear(self) -> None:
        """The module's forward has ended: keep nothing alive for it."""
        self._last = None


def _version(x: Tensor) -> int:
    """How often `x` was changed in place. A compiler has no such number."""
    return 0 if torch.compiler.is_dynamo_compiling() else x._version


@dataclass(eq=False)
class LinearSharding:
    """How one linear layer's parameters are sharded, and how it computes with them."""

    context: StageContext
    style: ParallelStyle
    sizes: tuple[int, int]
    """the whole layer's out- and in-features"""
    order: tuple[int, ...] | None = None
    """in which out-features are sharded; None: as they are"""
    shared_input: SharedInput | None = None
    """gathers the input; None: the layer does"""
    weight_axis: ClassVar[str] = "x"
    """the axis along which the weight is gathered"""
    number: int = field(default=0, init=False)
    """of the layer, in the context's `call_order`, where user code calls it"""
    _number_in_input: int = field(default=0, init=False)
    product: ShardedProduct = field(init=False)

    def __post_init__(self) -> None:
        (out, in_), size, style = self.sizes, self.context.mesh.size, self.style
        self.gathered_shape = -(-out // size(style.all_gather.axis)), -(-in_ // size(style.in_axes))
        self.matrix = Shard((DimShard(out, style.out_axes, self.order), DimShard(in_, style.in_axes)))
        self.vector = Shard((DimShard(out, style.between_axes, self.order),), style.replicated_axes)

    def attach(self, module: nn.Module) -> None:
        """Shard the layer's parameters, and make it compute with this."""
        transposed = not isinstance(module, nn.Linear)
        kind: Any = Linear3D if type(module) is nn.Linear else type(module)
        if not issubclass(kind, ShardedLinear):  # else it is converted once more
            kind = sharded_class(ShardedLinear, kind)
        matrix = Shard(self.matrix.dims[::-1]) if transposed else self.matrix
        shard_module(module, kind, {"weight": matrix, "bias": self.vector}, self.context.mesh, sharding=self)
        part = StoredWeight(module, self.gathered_shape, transposed)
        weight, style = self.context.weight(part, axis=self.weight_axis), self.style
        along = style.all_gather if self.shared_input is None else NO_COLLECTIVE
        self.product = ShardedProduct(weight, self.context, along, style.reduce_scatter)
        if self.shared_input is not None:
            self._number_in_input = self.shared_input.add(part)

    def parameter(self, module: "ShardedLinear", name: str) -> Tensor | None:
        """The parameter, as code outside the layer gets it."""
        return guarded_weight(module, name) if name == "weight" else module._parameters[name]

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The forward of the layer that this is attached to."""
        y = None if self.shared_input is None else self.shared_input.output(x, self._number_in_input)
        if y is None:
            y = self.product(x)[1]
        return y if bias is None else y + bias.to(y.dtype)


class ShardedLinear(nn.Module):
    """The base class of all 3-D linear layers, whichever class they were converted from."""

    sharding: LinearSharding
    weight = property(lambda self: self._of_sharding("weight"))
    bias = property(lambda self: self._of_sharding("bias"))

    def _of_sharding(self, name: str) -> Any:
        sharding = vars(self).get("sharding")  # None: until the constructor shards it
        return nn.Module.__getattr__(self, name) if sharding is None else sharding.parameter(self, name)

    def forward(self, x: Tensor) -> Tensor:
        """Called by all ranks of the mesh, in the same order."""
        if torch.compiler.is_dynamo_compiling():
            return self.sharding.forward(x, self._parameters["bias"])
        if x.is_nested:
            jagged: Any = x
            values = self.forward(jagged.values())
            return torch.nested.nested_tensor_from_jagged(values, jagged.offsets(), jagged.lengths())
        if isinstance(x, OfPart):
            x = x.view_as(x)  # whole, or refused
        if any(not isinstance(one, nn.Parameter | None) for one in self._parameters.values()):
            raise UnsupportedError(
                f"a linear layer of a cube ({type(self).__name__}) is called with another weight or bias than its own. "
                f"Use torch.nn.functional.linear, or leave the layer out with HanayoStrategy(cube_exclude=...)."
            )
        with torch._C.DisableTorchFunctionSubclass():  # the parameters are parts here, whatever block code sees
            return self.sharding.forward(x, self._parameters["bias"])


class Linear3D(ShardedLinear, nn.Linear):
    """y = x W^T + b, with 1/(x y z) of W, x and y on each rank.

    Column-parallel by default: x is [batch/x, seq/y, in/z], y is [batch/x, seq, out/(y z)]. `style.row_parallel()`
    leads back. Initial values don't depend on the mesh: each rank draws them whole from the default generator, which
    must be seeded alike on all ranks, and keeps its shard.

    Example:
        >>> up = Linear3D(64, 256, context=context)
        >>> down = Linear3D(256, 64, context=context, style=SEQUENCE.row_parallel())

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer; both must divide as `style` shards them.
        bias: whether there is one. Its gradient is a partial sum, which `all_reduce_partial_gradients` completes.
        context: of the stage.
        style: column- or row-parallel, and the sharding between layers.
        order: the out-features in the order in which they are sharded: fused projections head by head.
        shared_input: gathers the input for several layers.
        **factory: device and dtype.

    Raises:
        HanayoError: the features don't divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        context: StageContext,
        style: ParallelStyle = SEQUENCE,
        order: Sequence[int] | None = None,
        shared_input: SharedInput | None = None,
        **factory: Any,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, **factory)
        self.shard(context, style, order=order, shared_input=shared_input)

    def shard(self, context: StageContext, style: ParallelStyle, **options: Any) -> None:
        """Shard the whole layer. Called once, by the constructor."""
        parallelize_linear(self, context, style, **options)


def parallelize_linear(
    module: nn.Module,
    context: StageContext,
    style: ParallelStyle = SEQUENCE,
    *,
    order: Sequence[int] | None = None,
    shared_input: SharedInput | None = None,
) -> None:
    """Parallelize an `nn.Linear` or a `Conv1D` in place. Parameter objects, names and attributes stay.

    Raises:
        HanayoError: its features don't divide.
    """
    (out, in_), name = features(module), type(module).__name__
    sharding = LinearSharding(context, style, (out, in_), None if order is None else tuple(order), shared_input)
    required = [
        Divisibility(name, "out-features", out, sharding.vector.axes),
        Divisibility(name, "in-features", in_, style.in_axes),
    ]
    check_divisibility(required, context.mesh.sizes)
    sharding.attach(module)


def features(module: nn.Module) -> tuple[int, int]:
    """Returns the out- and in-features of an `nn.Linear` or `Conv1D` that isn't sharded yet."""
    weight = module._parameters["weight"]
    assert weight is not None
    out, in_ = weight.shape if isinstance(module, nn.Linear) else reversed(weight.shape)
    return out, in_


class FeedForward3D(nn.Module):
    """down(dropout(activation(up(x)))).

    Example:
        >>> FeedForward3D(768, 3072, dropout=0.1, context=context)

    Args:
        features: of the residual stream.
        inner_features: between up and down.
        activation: a function that computes each entry from itself alone.
        dropout: the probability.
        bias: whether both linear layers have one.
        context: of the stage.
        style: of `up`; `down` is its row-parallel counterpart.
        **factory: device and dtype.
    """

    def __init__(
        self,
        features: int,
        inner_features: int,
        activation: Callable[[Tensor], Tensor] = nn.functional.gelu,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        context: StageContext,
        style: ParallelStyle = SEQUENCE,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.up = Linear3D(features, inner_features, bias, context=context, style=style, **factory)
        self.activation = activation
        self.dropout = Dropout3D(dropout, context=context)
        self.down = Linear3D(inner_features, features, bias, context=context, style=style.row_parallel(), **factory)

    def forward(self, x: Tensor) -> Tensor:
        """[batch/x, seq/y, h/z] to the same. Called by all ranks of the mesh, in the same order."""
        y: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return y


class SwiGLU3D(nn.Module):
    """down(silu(gate(x)) * up(x)), where gate and up are one product. Source: Shazeer, arXiv 2002.05202.

    Example:
        >>> SwiGLU3D(4096, 11008, context=context)

    Args:
        features: of the residual stream.
        inner_features: of gate and up, each.
        bias: whether all three linear layers have one.
        context: of the stage.
        style: of `gate` and `up`; `down` is its row-parallel counterpart.
        **factory: device and dtype.
    """

    def __init__(
        self,
        features: int,
        inner_features: int,
        *,
        bias: bool = False,
        context: StageContext,
        style: ParallelStyle = SEQUENCE,
        **factory: Any,
    ) -> None:
        super().__init__()
        self._shared_input = SharedInput(context, style)
        shared: dict[str, Any] = {"context": context, "style": style, "shared_input": self._shared_input, **factory}
        self.gate = Linear3D(features, inner_features, bias, **shared)
        self.up = Linear3D(features, inner_features, bias, **shared)
        self.down = Linear3D(inner_features, features, bias, context=context, style=style.row_parallel(), **factory)

    def forward(self, x: Tensor) -> Tensor:
        """[batch/x, seq/y, h/z] to the same. Called by all ranks of the mesh, in the same order."""
        gathered = self._shared_input.all_gather(as_autocast(x))
        inner = silu(self.gate(gathered)) * self.up(gathered)
        self._shared_input.clear()
        y: Tensor = self.down(inner)
        return y
