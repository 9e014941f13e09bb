"""3-D parallel LayerNorm and RMSNorm, for a residual stream whose features are sharded along z.

forward     (variance, mean) of each part [batch/x, seq/y, h/z]: one all-gather of 2 numbers per token
backward    two sums per token: one all-reduce

Each part has its variance around its own mean; that of the whole is the mean of the variances plus the variance of the
means. Where a mean is large, the difference of two large sums would be noise. An RMSNorm has no mean: one number per
token both ways.

Dropout whose masks differ between ranks, though all ranks go on with equal random generators.

default generator      equal on all ranks: one number n is drawn, and the state goes on from there
rank's own stream      seeded by (n, rank): masks are drawn from it, inside the context only

No two ranks hold the same part of an activation, so each rank draws its own masks. Only the default generator is
advanced outside, so an activation checkpoint has nothing else to restore.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import layer_norm

from lightning_hanayo.divisibility import Divisibility, check_divisibility
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.seeds import default_generator, mix
from lightning_hanayo.tensor_parallel.compiled_ops import compiled_all_gather, compiled_all_reduce, new_handle
from lightning_hanayo.tensor_parallel.mesh import MeshAxis
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard, shard_module, sharded_class
from lightning_hanayo.tensor_parallel.stage_context import StageContext

Collective = Callable[[Tensor], Tensor]

Sizes = tuple[tuple[str, int, str], ...]
"""sizes that must divide: their unit, their number, and the axes over which they are sharded"""


@dataclass(frozen=True)
class _Normalization:
    """How a norm computes one output.

    Args:
        num_parts: of each token, one on each rank of z.
        eps: added to the variance; None: the machine epsilon of the dtype.
        centered: whether the mean is subtracted.
        compute: the dtype of all arithmetic.
        out: the dtype of the output.
        rounded: the dtype to which values are rounded before they are scaled by the weight; None: they aren't.
    """

    num_parts: int
    eps: float | None
    centered: bool
    compute: torch.dtype
    out: torch.dtype
    rounded: torch.dtype | None = None

    def wide(self, x: Tensor) -> Tensor:
        """`x` such that products with statistics have the dtype of all arithmetic."""
        return x.to(self.compute) if x.dtype is torch.float64 else x

    def statistics(self, x: Tensor, all_gather: Collective, all_reduce: Collective) -> tuple[Tensor | None, Tensor]:
        """[..., n] to the mean over all parts, and 1 / the deviation from it (from 0 if not centered), [..., 1]."""
        eps = torch.finfo(self.compute).eps if self.eps is None else self.eps
        if self.centered:
            own = torch.var_mean(x.to(self.compute), -1, correction=0, keepdim=True)
            variances, means = all_gather(torch.stack(own)).unbind(1)
            variance = variances.mean(0) + means.var(0, correction=0)
            return means.mean(0), torch.rsqrt(variance + eps)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self.compute).square()
        return None, torch.rsqrt(all_reduce(square) / (x.shape[-1] * self.num_parts) + eps)

    def normalize(self, x: Tensor, mean: Tensor | None, scale: Tensor) -> Tensor:
        """(x - mean) * scale, rounded."""
        values = (x if mean is None else x - mean) * scale
        return values if self.rounded is None or values.dtype is self.rounded else values.to(self.rounded)

    def output(self, normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """normalized * weight + bias."""
        y = normalized if weight is None else normalized * weight
        y = y if bias is None else y + bias
        return y if y.dtype is self.out else y.to(self.out)

    def input_gradient(self, inner: Tensor, normalized: Tensor, along: Tensor, scale: Tensor, axis: MeshAxis) -> Tensor:
        """The gradient of x: `inner`, that of `normalized`, without the parts along its mean and along itself.

        `along` is the product of both, entry by entry.
        """
        along = along.sum(-1, keepdim=True)
        size = inner.shape[-1] * self.num_parts
        if not self.centered:
            return torch.addcmul(inner, normalized, axis.all_reduce(along).wait(), value=-1 / size).mul_(scale)
        sums = torch.stack((along, inner.sum(-1, keepdim=True)))
        along, mean = (axis.all_reduce(sums).wait() / size).unbind()
        return torch.addcmul(inner, normalized, along, value=-1).sub_(mean).mul_(scale)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: _Normalization, axis: MeshAxis
    ) -> Tensor:
        wide = norm.wide(x)
        mean, scale = norm.statistics(wide, lambda x: axis.all_gather(x).wait(), lambda x: axis.all_reduce(x).wait())
        ctx.norm, ctx.axis = norm, axis
        ctx.save_for_backward(x, mean, scale, weight)
        return norm.output(norm.normalize(wide, mean, scale), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        norm: _Normalization = ctx.norm
        x, mean, scale, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradient, rows = gradient.to(norm.compute), tuple(range(x.dim() - 1))
        normalized = norm.normalize(norm.wide(x), mean, scale)
        product = gradient * normalized
        dx = dweight = dbias = None
        if needs_weight:
            dweight = product.sum(rows).to(weight.dtype)
        if needs_bias:
            dbias = gradient.sum(rows)
        if needs_x:
            inner, along = (gradient, product) if weight is None else (gradient * weight, product * weight)
            dx = norm.input_gradient(inner, normalized.to(norm.compute), along, scale, ctx.axis).to(x.dtype)
        return dx, dweight, dbias, None, None


class ShardedNorm(nn.Module):
    """The base class of all 3-D norms. Arguments are those of the norm; gradients are partial sums over x and y.

    In compiled code it is written in plain operations, which the compiler fuses, and differentiates.
    """

    context: StageContext
    eps: Any
    _num_parts: int
    _axis_handle: Tensor

    def __init__(self, *args: Any, context: StageContext, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallelize_norm(self, context)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """[..., h/z] to the same. Called by all ranks of z."""
        if self._num_parts == 1:
            return super().forward(x)  # type: ignore[no-any-return]
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        if torch.compiler.is_dynamo_compiling():
            norm, handle, num_parts = self._normalization(x), self._axis_handle, self._num_parts
            wide = norm.wide(x)
            mean, scale = norm.statistics(
                wide, lambda x: compiled_all_gather(x, handle, num_parts), lambda x: compiled_all_reduce(x, handle)
            )
            return norm.output(norm.normalize(wide, mean, scale), weight, bias)
        axis = self.context.mesh.axis("z")
        y: Tensor = _Norm.apply(x, weight, bias, self._normalization(x), axis)
        return y

    def _normalization(self, x: Tensor) -> _Normalization:
        """As torch's norms: in fp32 at least, and to the dtype that they return, with autocast or without."""
        compute = torch.promote_types(x.dtype, torch.float32)
        made = layer_norm(torch.empty(0, 1, dtype=x.dtype, device=x.device), (1,))
        return _Normalization(self._num_parts, self.eps, isinstance(self, nn.LayerNorm), compute, made.dtype)


class LayerNorm3D(ShardedNorm, nn.LayerNorm):
    """An `nn.LayerNorm` over features that are sharded along z.

    Example:
        >>> norm = LayerNorm3D(768, context=context)
    """


class RMSNorm3D(ShardedNorm, nn.RMSNorm):
    """An `nn.RMSNorm` over features that are sharded along z.

    Example:
        >>> norm = RMSNorm3D(768, eps=1e-6, context=context)
    """


class _HuggingFaceRMSNorm(ShardedNorm):
    """Computes in fp32, and rounds to the input's dtype before it scales by the weight."""

    epsilon: float

    def _normalization(self, x: Tensor) -> _Normalization:
        weight = self._parameters["weight"]
        assert weight is not None
        out = torch.promote_types(weight.dtype, x.dtype)
        return _Normalization(self._num_parts, self.epsilon, False, torch.float32, out, rounded=x.dtype)


def parallelize_norm(module: nn.LayerNorm | nn.RMSNorm, context: StageContext) -> None:
    """Parallelize an `nn.LayerNorm` or an `nn.RMSNorm` in place.

    Raises:
        UnsupportedError: it normalizes over several dimensions.
        HanayoError: its features don't divide.
    """
    _shard(module, context, LayerNorm3D if isinstance(module, nn.LayerNorm) else RMSNorm3D)


def parallelize_rms_norm(module: nn.Module, context: StageContext, eps: float | None = None) -> None:
    """Parallelize an RMSNorm in place: torch's, or one that computes the same as Hugging Face's `LlamaRMSNorm`.

    Args:
        module: has a `weight`, and no other parameter.
        context: of the stage.
        eps: added to the mean square; None: the module has it as `variance_epsilon`.

    Raises:
        UnsupportedError: the module has no `weight`.
        HanayoError: its features don't divide.
    """
    if isinstance(module, nn.RMSNorm):
        parallelize_norm(module, context)
        return
    norm_sizes(module)  # before its epsilon: what isn't a norm has none
    epsilon = float(module.variance_epsilon if eps is None else eps)  # type: ignore[arg-type]
    _shard(module, context, sharded_class(_HuggingFaceRMSNorm, type(module)))  # type: ignore[arg-type]
    module.epsilon = epsilon  # type: ignore[assignment]


def norm_sizes(module: Any) -> Sizes:
    """The sizes that must divide.

    Raises:
        UnsupportedError: the module normalizes over several dimensions, or has no `weight`.
    """
    is_torchs = isinstance(module, nn.LayerNorm | nn.RMSNorm)
    shape: Any = module.normalized_shape if is_torchs else getattr(module._parameters.get("weight"), "shape", ())
    if len(shape) != 1:
        several = (
            f"normalizes over the last {len(shape)} dimensions {tuple(shape)}; over a cube only the last one can be"
        )
        problem = several if shape else "has no parameter `weight`; leave it out of the cube"
        raise UnsupportedError(f"{type(module).__name__} {problem}")
    return (("features", shape[0], "z"),)


def _shard(module: nn.Module, context: StageContext, kind: type[nn.Module]) -> None:
    (size,), mesh = norm_sizes(module), context.mesh
    check_divisibility([Divisibility(type(module).__name__, *size)], mesh.sizes)
    shards = dict.fromkeys(("weight", "bias"), Shard((DimShard(size[1], "z"),), "xy"))
    handle, num_parts = new_handle(mesh.axis("z")), mesh.size("z")
    shard_module(module, kind, shards, mesh, context=context, _num_parts=num_parts, _axis_handle=handle)


def replicate_norm(module: Any, context: StageContext) -> None:
    """Keep a norm of each head's features whole on all ranks. Each sums the gradient over its own heads."""
    shards = {name: Shard(tuple(map(DimShard, p.shape)), "xyz") for name, p in module.named_parameters(recurse=False)}
    shard_module(module, type(module), shards, context.mesh)


@contextmanager
def rank_random_stream(context: StageContext, device: torch.device) -> Iterator[None]:
    """Inside, `device`'s default generator draws from this rank's own stream; afterwards all ranks are equal again.

    Example:
        >>> with rank_random_stream(context, x.device):
        ...     y = torch.nn.functional.dropout(x, 0.1)
    """
    if context.mesh.num_ranks == 1:
        yield
        return
    seed = mix(int(torch.randint(1 << 62, ())), context.mesh.index("xyz"))
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class Dropout3D(nn.Dropout):
    """An `nn.Dropout` whose masks differ from rank to rank. All ranks of the mesh call it, in the same order.

    Example:
        >>> dropout = Dropout3D(0.1, context=context)
    """

    context: StageContext

    def __init__(self, p: float = 0.5, inplace: bool = False, *, context: StageContext) -> None:
        super().__init__(p, inplace)
        parallelize_dropout(self, context)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same. Draws nothing where nothing is dropped."""
        if not self.training or self.p == 0.0:
            return x
        y: Tensor = _drop(self, x)
        return y


@torch.compiler.disable
def _drop(module: Dropout3D, x: Tensor) -> Tensor:
    """Draws from this rank's own stream. A compiled graph has one stream for all."""
    with rank_random_stream(module.context, x.device):
        y: Tensor = nn.Dropout.forward(module, x)
    return y


def parallelize_dropout(module: nn.Dropout, context: StageContext) -> None:
    """Parallelize an `nn.Dropout` in place."""
    if not isinstance(module, Dropout3D):
        module.__class__ = Dropout3D
    module.context = context  # type: ignore[assignment]
