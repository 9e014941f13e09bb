"""A quantized weight as torchao has them: a tensor subclass that computes with what it is made of."""

from typing import Any

import torch
from torch import Tensor


class Quantized(Tensor):
    """A tensor made of 8-bit integers and scales, as torchao's: [out, in] in the dtype of the scales [out, 1]."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> "Quantized":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    @staticmethod
    def of(weight: Tensor) -> "Quantized":
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        return Quantized((weight.detach() / scales).round().to(torch.int8), scales)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> "Quantized":
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Aliases and copies stay quantized, as does another dtype; everything else computes with the numbers."""
        name = func.overloadpacket.__name__
        if name in ("detach", "clone", "alias", "_to_copy"):
            options = {"dtype": (kwargs or {}).get("dtype")} if name == "_to_copy" else {}
            return cls(func(args[0].codes), func(args[0].scales, **options))
        if name not in ("linear", "t", "mm", "addmm", "transpose", "sub", "sum", "abs"):
            raise NotImplementedError(f"{name} of a quantized weight")
        numbers = [one.codes * one.scales if isinstance(one, Quantized) else one for one in args]
        return func(*numbers, **(kwargs or {}))
