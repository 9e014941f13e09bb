"""Parameters whose values are not those of one plain tensor: quantized weights, and other tensor subclasses.

torchao           a tensor subclass, [32, 16] in float32        made of qdata [32, 16] int8, scale [32, 1], ...
bitsandbytes      a subclass of Parameter, [256, 1] in uint8    its attribute quant_state holds absmax [8], ...
"""

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_DEPTH = 3
"""attributes of a parameter, of its quantization state, and of the state of that state"""


def is_tensor_subclass(tensor: Tensor) -> bool:
    """Whether the tensor is made of others, with which its class computes."""
    with torch._C.DisableTorchFunctionSubclass():
        return is_traceable_wrapper_subclass(tensor.data)


def is_packed(parameter: Tensor) -> bool:
    """Whether a parameter's values are not those of one plain tensor."""
    own_class = type(parameter) is not nn.Parameter and not parameter.is_floating_point()
    return own_class or is_tensor_subclass(parameter)


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the plain tensors that a tensor of a subclass is made of; a plain tensor itself."""
    if not is_tensor_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from inner_tensors(getattr(tensor, name))


def stored_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the plain tensors that hold the values of a parameter or buffer, also in attributes of a packed one."""
    yield from inner_tensors(tensor)
    if isinstance(tensor, nn.Parameter) and is_packed(tensor) and not is_tensor_subclass(tensor):
        yield from _tensors_in(vars(tensor), _DEPTH)


def to_bytes(value: Any) -> Tensor:
    """A tensor of a subclass, or another value, as bytes, [size] in uint8, for ranks to send."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def from_bytes(sent: Tensor) -> Any:
    """The value that `to_bytes` was given, on the CPU. The bytes come from a rank of the same run."""
    return torch.load(io.BytesIO(sent.numpy().tobytes()), map_location="cpu", weights_only=False)


def _tensors_in(attributes: dict[str, Any], depth: int) -> Iterator[Tensor]:
    for value in attributes.values():
        if isinstance(value, Tensor):
            yield value
        elif depth > 1 and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
            yield from _tensors_in(vars(value), depth - 1)
