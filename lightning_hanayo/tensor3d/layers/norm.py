"""The norms over the grid: LayerNorm and RMSNorm of a residual stream whose features lie along z.

x [batch/x, seq/y, h/z]    (mean, M2) of each part: one all-gather of 2 numbers per token, merged as Chan et al. do
gradient                   two sums per token: one all-reduce

Squares are summed around each part's own mean: the difference of two large sums would be noise where a mean is large.
An RMSNorm has no mean: one number per token both ways.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import layer_norm

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.tensor3d.divisibility import Divisibility, check
from lightning_hanayo.tensor3d.mesh import MeshAxis
from lightning_hanayo.tensor3d.sharding import Cut, Shard
from lightning_hanayo.tensor3d.stage_context import StageContext


@dataclass(frozen=True)
class _How:
    """What a norm does to one input.

    Args:
        axis: along which the features lie.
        eps: added to the variance; None: what the dtype resolves.
        centred: whether the mean is taken away.
        compute: the dtype of all arithmetic.
        out: the result's dtype.
        rounded: what is rounded to before the gain; None: nothing is.
    """

    axis: MeshAxis
    eps: float | None
    centred: bool
    compute: torch.dtype
    out: torch.dtype
    rounded: torch.dtype | None = None

    def statistics(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """[..., n] to the mean over all parts, and 1 / the deviation from it (from 0 if it isn't centred), [..., 1]."""
        eps = torch.finfo(self.compute).eps if self.eps is None else self.eps
        size, mean = x.shape[-1] * self.axis.size, None
        if self.centred:
            own = x.mean(-1, keepdim=True)
            parts = self.axis.all_gather(torch.stack((own, (x - own).square().sum(-1, keepdim=True)))).wait()
            means, squares = parts.unbind(1)
            mean = means.mean(0)
            square = squares.sum(0) + x.shape[-1] * (means - mean).square().sum(0)
        else:
            square = self.axis.all_reduce(x.square().sum(-1, keepdim=True)).wait()
        return mean, torch.rsqrt(square / size + eps)

    def normalised(self, x: Tensor, mean: Tensor | None, scale: Tensor) -> Tensor:
        """(x - mean) * scale."""
        values = (x if mean is None else x - mean) * scale
        return values if self.rounded is None else values.to(self.rounded).to(self.compute)

    def input_gradient(self, gradient: Tensor, normalised: Tensor, scale: Tensor) -> Tensor:
        """The gradient of `normalised` without what can't change it: its mean and its length."""
        along = (gradient * normalised).sum(-1, keepdim=True)
        sums = torch.stack((along, gradient.sum(-1, keepdim=True))) if self.centred else along.unsqueeze(0)
        sums = self.axis.all_reduce(sums).wait() / (gradient.shape[-1] * self.axis.size)
        dx = torch.addcmul(gradient, normalised, sums[0], value=-1)
        return (dx - sums[1] if self.centred else dx) * scale


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, bias: Tensor | None, how: _How) -> Tensor:
        wide = x.to(how.compute)
        mean, scale = how.statistics(wide)
        ctx.how = how
        ctx.save_for_backward(x, mean, scale, gain)
        y = how.normalised(wide, mean, scale)
        y = y if gain is None else y * gain
        return (y if bias is None else y + bias).to(how.out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        how: _How = ctx.how
        x, mean, scale, gain = ctx.saved_tensors
        needs_x, needs_gain, needs_bias, _ = ctx.needs_input_grad
        gradient, rows = gradient.to(how.compute), tuple(range(x.dim() - 1))
        normalised = how.normalised(x.to(how.compute), mean, scale)
        dx = dgain = dbias = None
        if needs_x:
            inner = gradient if gain is None else gradient * gain
            dx = how.input_gradient(inner, normalised, scale).to(x.dtype)
        if needs_gain:
            dgain = (gradient * normalised).sum(rows).to(gain.dtype)
        if needs_bias:
            dbias = gradient.sum(rows)
        return dx, dgain, dbias, None


class SpreadNorm(nn.Module):
    """What all norms over the grid have in common: how their parameters are cut."""

    setting: StageContext
    shards: dict[str, Shard]

    def normalise(self, x: Tensor, *, centred: bool, eps: float | None) -> Tensor:
        """As torch's norms: in fp32 at least, and in the dtype that they give, autocast or not."""
        compute = torch.promote_types(x.dtype, torch.float32)
        out = layer_norm(x.new_empty(0, x.shape[-1]), x.shape[-1:]).dtype
        how = _How(self.setting.grid.axis("z"), eps, centred, compute, out)
        y: Tensor = _Norm.apply(x, self._parameters["weight"], self._parameters.get("bias"), how)
        return y


class LayerNorm3D(SpreadNorm, nn.LayerNorm):
    """An `nn.LayerNorm` over features that lie along z. Arguments as there; gradients are partial sums over x and y."""

    def __init__(self, *args: Any, setting: StageContext, **kwargs: Any) -> None:
        nn.LayerNorm.__init__(self, *args, **kwargs)
        spread_norm(self, setting)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h/z] to the same. Called by all ranks of z."""
        if self.setting.grid.size("z") == 1:
            return nn.LayerNorm.forward(self, x)
        return self.normalise(x, centred=True, eps=self.eps)


class RMSNorm3D(SpreadNorm, nn.RMSNorm):
    """An `nn.RMSNorm` over features that lie along z. Arguments as there; gradients are partial sums over x and y."""

    def __init__(self, *args: Any, setting: StageContext, **kwargs: Any) -> None:
        nn.RMSNorm.__init__(self, *args, **kwargs)
        spread_norm(self, setting)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h/z] to the same. Called by all ranks of z."""
        if self.setting.grid.size("z") == 1:
            return nn.RMSNorm.forward(self, x)
        return self.normalise(x, centred=False, eps=self.eps)


class _RoundedRMSNorm(SpreadNorm):
    """Hugging Face's: in fp32 whatever comes, rounded to the input's dtype before the gain."""

    epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        """[..., h/z] to the same. Called by all ranks of z."""
        if self.setting.grid.size("z") == 1:
            return super().forward(x)  # type: ignore[no-any-return]
        gain = self._parameters["weight"]
        assert gain is not None
        out = torch.promote_types(gain.dtype, x.dtype)
        how = _How(self.setting.grid.axis("z"), self.epsilon, False, torch.float32, out, rounded=x.dtype)
        y: Tensor = _Norm.apply(x, gain, None, how)
        return y


def spread_norm(module: nn.Module, setting: StageContext) -> None:
    """Spread an `nn.LayerNorm` or an `nn.RMSNorm` over the grid, in place.

    Raises:
        UnsupportedError: it is another module, or normalises over several dimensions.
        HanayoError: its features don't divide.
    """
    if not isinstance(module, nn.LayerNorm | nn.RMSNorm):
        raise UnsupportedError(f"{type(module).__name__} isn't nn.LayerNorm or nn.RMSNorm; leave it out of the cube")
    if len(module.normalized_shape) > 1:
        raise UnsupportedError(
            f"{type(module).__name__} normalises over the last {len(module.normalized_shape)} dimensions "
            f"{tuple(module.normalized_shape)}; over the cube only the last one can be, as tokens lie along x and y"
        )
    _connect(module, setting, module.normalized_shape[0])
    if not isinstance(module, SpreadNorm):
        module.__class__ = LayerNorm3D if isinstance(module, nn.LayerNorm) else RMSNorm3D


def spread_rms_norm(module: nn.Module, setting: StageContext, eps: float | None = None) -> None:
    """Spread an RMSNorm over the grid, in place: torch's, or one that computes what Hugging Face's `LlamaRMSNorm` does.

    Args:
        module: with a `weight`, and nothing else to learn.
        setting: the stage's.
        eps: where it isn't in `variance_epsilon`.
    """
    if isinstance(module, nn.RMSNorm):
        spread_norm(module, setting)
        return
    weight = module._parameters.get("weight")
    if weight is None:
        raise UnsupportedError(f"{type(module).__name__} has no gain `weight`; leave it out of the cube")
    _connect(module, setting, weight.shape[0])
    module.epsilon = float(module.variance_epsilon if eps is None else eps)  # type: ignore[arg-type, assignment]
    module.__class__ = _rounded_class(type(module))  # type: ignore[arg-type]


def _connect(module: Any, setting: StageContext, size: int) -> None:
    check([Divisibility(type(module).__name__, "features", size, "z")], setting.grid.sizes)
    module.setting, module.shards = setting, {}
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if parameter is not None:
            module.shards[name] = Shard((Cut(size, "z"),), "xy")
            parameter.data = module.shards[name].of(parameter.data, setting.grid)


@lru_cache
def _rounded_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__}3D", (_RoundedRMSNorm, kind), {"__doc__": f"A {kind.__name__} over the grid."})
