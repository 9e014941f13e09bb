"""3-D parallel LayerNorm and RMSNorm, for a residual stream whose features are sharded along z.

forward     (mean, M2) of each part [batch/x, seq/y, h/z]: one all-gather of 2 numbers per token
backward    two sums per token: one all-reduce

Each part sums squares around its own mean, and the parts are merged by the method of Chan, Golub and LeVeque: where a
mean is large, the difference of two large sums would be noise. An RMSNorm has no mean: one number per token both ways.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import layer_norm

from lightning_hanayo.divisibility import Divisibility, check_divisibility
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.tensor3d.mesh import MeshAxis
from lightning_hanayo.tensor3d.sharding import DimShard, Shard, ShardedModule, shard_parameters, sharded_class
from lightning_hanayo.tensor3d.stage_context import StageContext


@dataclass(frozen=True)
class _Normalization:
    """How a norm computes one output.

    Args:
        eps: added to the variance; None: the machine epsilon of the dtype.
        centered: whether the mean is subtracted.
        compute: the dtype of all arithmetic.
        rounded: the dtype to which values are rounded before they are scaled by the weight; None: they aren't.
    """

    axis: MeshAxis
    eps: float | None
    centered: bool
    compute: torch.dtype
    out: torch.dtype
    rounded: torch.dtype | None = None

    def statistics(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """[..., n] to the mean over all parts, and 1 / the deviation from it (from 0 if not centered), [..., 1]."""
        eps = torch.finfo(self.compute).eps if self.eps is None else self.eps
        size, mean = x.shape[-1] * self.axis.size, None
        if self.centered:
            own = x.mean(-1, keepdim=True)
            parts = self.axis.all_gather(torch.stack((own, (x - own).square().sum(-1, keepdim=True)))).wait()
            means, squares = parts.unbind(1)
            mean = means.mean(0)
            square = squares.sum(0) + x.shape[-1] * (means - mean).square().sum(0)
        else:
            square = self.axis.all_reduce(x.square().sum(-1, keepdim=True)).wait()
        return mean, torch.rsqrt(square / size + eps)

    def normalize(self, x: Tensor, mean: Tensor | None, scale: Tensor) -> Tensor:
        """(x - mean) * scale."""
        values = (x if mean is None else x - mean) * scale
        return values if self.rounded is None else values.to(self.rounded).to(self.compute)

    def input_gradient(self, gradient: Tensor, normalized: Tensor, scale: Tensor) -> Tensor:
        """The gradient of x: that of `normalized`, without the parts along its mean and along itself."""
        along = (gradient * normalized).sum(-1, keepdim=True)
        sums = torch.stack((along, gradient.sum(-1, keepdim=True))) if self.centered else along.unsqueeze(0)
        sums = self.axis.all_reduce(sums).wait() / (gradient.shape[-1] * self.axis.size)
        dx = torch.addcmul(gradient, normalized, sums[0], value=-1)
        return (dx - sums[1] if self.centered else dx) * scale


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: _Normalization) -> Tensor:
        wide = x.to(norm.compute)
        mean, scale = norm.statistics(wide)
        ctx.norm = norm
        ctx.save_for_backward(x, mean, scale, weight)
        y = norm.normalize(wide, mean, scale)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(norm.out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        norm: _Normalization = ctx.norm
        x, mean, scale, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gradient, rows = gradient.to(norm.compute), tuple(range(x.dim() - 1))
        normalized = norm.normalize(x.to(norm.compute), mean, scale)
        dx = dweight = dbias = None
        if needs_x:
            inner = gradient if weight is None else gradient * weight
            dx = norm.input_gradient(inner, normalized, scale).to(x.dtype)
        if needs_weight:
            dweight = (gradient * normalized).sum(rows).to(weight.dtype)
        if needs_bias:
            dbias = gradient.sum(rows)
        return dx, dweight, dbias, None


class ShardedNorm(ShardedModule):
    """What all 3-D norms have in common. Arguments are those of the norm; gradients are partial sums over x and y."""

    context: StageContext
    eps: Any

    def __init__(self, *args: Any, context: StageContext, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallelize_norm(self, context)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h/z] to the same. Called by all ranks of z."""
        if self.context.mesh.size("z") == 1:
            return super().forward(x)  # type: ignore[no-any-return]
        y: Tensor = _Norm.apply(x, self._parameters["weight"], self._parameters.get("bias"), self._normalization(x))
        return y

    def _normalization(self, x: Tensor) -> _Normalization:
        """As torch's norms: in fp32 at least, and to the dtype that they return, with autocast or without."""
        compute = torch.promote_types(x.dtype, torch.float32)
        out = layer_norm(x.new_empty(0, x.shape[-1]), x.shape[-1:]).dtype
        is_centered = isinstance(self, nn.LayerNorm)
        return _Normalization(self.context.mesh.axis("z"), self.eps, is_centered, compute, out)


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
        return _Normalization(self.context.mesh.axis("z"), self.epsilon, False, torch.float32, out, rounded=x.dtype)


def parallelize_norm(module: nn.Module, context: StageContext) -> None:
    """Parallelize an `nn.LayerNorm` or an `nn.RMSNorm` in place.

    Raises:
        UnsupportedError: it is another module, or normalizes over several dimensions.
        HanayoError: its features don't divide.
    """
    if not isinstance(module, nn.LayerNorm | nn.RMSNorm):
        raise UnsupportedError(f"{type(module).__name__} isn't nn.LayerNorm or nn.RMSNorm; leave it out of the cube")
    if len(module.normalized_shape) > 1:
        raise UnsupportedError(
            f"{type(module).__name__} normalizes over the last {len(module.normalized_shape)} dimensions "
            f"{tuple(module.normalized_shape)}; over the cube only the last one can be, as tokens are sharded along x "
            f"and y"
        )
    _attach(module, context, module.normalized_shape[0])
    if not isinstance(module, ShardedNorm):
        module.__class__ = LayerNorm3D if isinstance(module, nn.LayerNorm) else RMSNorm3D


def parallelize_rms_norm(module: nn.Module, context: StageContext, eps: float | None = None) -> None:
    """Parallelize an RMSNorm in place: torch's, or one that computes what Hugging Face's `LlamaRMSNorm` does.

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
    weight = module._parameters.get("weight")
    if weight is None:
        raise UnsupportedError(f"{type(module).__name__} has no parameter `weight`; leave it out of the cube")
    _attach(module, context, weight.shape[0])
    module.epsilon = float(module.variance_epsilon if eps is None else eps)  # type: ignore[arg-type, assignment]
    module.__class__ = sharded_class(_HuggingFaceRMSNorm, type(module))  # type: ignore[arg-type]


def _attach(module: Any, context: StageContext, size: int) -> None:
    check_divisibility([Divisibility(type(module).__name__, "features", size, "z")], context.mesh.sizes)
    module.context = context
    shard_parameters(module, dict.fromkeys(("weight", "bias"), Shard((DimShard(size, "z"),), "xy")), context.mesh)


def replicate_norm(module: Any, context: StageContext) -> None:
    """Keep a norm of each head's features whole on all ranks. Each sums the gradient over its own heads."""
    shards = {name: Shard(tuple(map(DimShard, p.shape)), "xyz") for name, p in module.named_parameters(recurse=False)}
    shard_parameters(module, shards, context.mesh)
