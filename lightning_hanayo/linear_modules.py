"""Rules about linear layers that stages and 3-D layers share: which modules are linear, and the dtype of autocast."""

import torch
from torch import Tensor, nn

from lightning_hanayo.packed_values import is_tensor_subclass


def is_linear(module: nn.Module) -> bool:
    """Whether this is exactly `nn.Linear` or Hugging Face's `Conv1D`: a subclass may compute something else.

    So may a weight of a tensor subclass, as torchao's quantized ones.
    """
    cls, weight = type(module), module._parameters.get("weight")
    is_layer = cls is nn.Linear or (cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils")
    return is_layer and (weight is None or not is_tensor_subclass(weight))


def as_autocast(x: Tensor) -> Tensor:
    """`x` in the dtype in which autocast would multiply it. Double precision stays double."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device) or x.dtype is torch.float64 or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(device))


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether hooks are registered that see this parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
