"""fp32 gradients, and fp32 master weights for the optimizer, of parameters in bf16 or fp16.

    forward, backward     p.data  bf16          p.grad  fp32: each micro-batch's gradient is cast, then added
    reductions, clipping                        p.grad  fp32
    optimizer.step()      p.data  fp32 master   p.grad  fp32: any optimizer finds fp32 parameters, and makes fp32 states
    afterwards            p.data  bf16, rounded from the master

The `Parameter` objects stay, so optimizers, param groups, schedulers and checkpoints need know nothing of it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_hanayo.errors import HanayoError, UnsupportedError

_LOW = (torch.bfloat16, torch.float16)


class MasterWeights:
    """The master weights of one rank, for one run.

    Args:
        parameters: all of the module's, other ranks' placeholders included.
        optimizers: whose parameters get master weights.

    Raises:
        HanayoError: no parameter is in bf16 or fp16.
        UnsupportedError: an optimizer whose step can't be made to use them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        self._low = [parameter for parameter in parameters if parameter.dtype in _LOW]
        self._masters: dict[nn.Parameter, Tensor] = {}
        self._replaced: dict[nn.Parameter, Tensor] = {}
        if not self._low:
            raise HanayoError(
                "master_weights='fp32' is for parameters in bf16 or fp16, but the module has none. Set "
                "Trainer(precision='bf16-true'), or leave it out: with 'bf16-mixed' the parameters are in fp32 already."
            )
        for optimizer in optimizers:
            _widen_states(optimizer)
        for parameter in self._low:
            parameter.grad, parameter.grad_dtype = None, torch.float32

    def put_in(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let these parameters, of those that are trained here in bf16 or fp16, have the master weights' values."""
        for parameter in parameters:
            if parameter.dtype in _LOW and parameter.requires_grad:  # more may be added, or no longer be frozen
                self._replaced[parameter] = parameter.data
                parameter.data = self._take_master(parameter)

    def take_out(self) -> None:
        """Round the master weights into the memory that the parameters had, which layers may know."""
        for parameter, low in self._replaced.items():
            self._masters[parameter] = parameter.data
            parameter.data = low.copy_(parameter.data)
        self._replaced.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """The master weights that no parameter has now."""
        return list(self._masters.values())

    def close(self) -> None:
        """The run has ended: free gradients, and keep the master weights in host memory, for checkpoints."""
        masters = {parameter: master.cpu() for parameter, master in self._masters.items()}
        self.abandon()
        self._masters = masters

    def abandon(self) -> None:
        """The run has failed: free gradients and master weights. After a step that failed the weights are as before it.

        Computes nothing: a device that has failed can't.
        """
        for parameter, low in self._replaced.items():
            parameter.data = low
        for parameter in self._low:
            parameter.grad, parameter.grad_dtype = None, parameter.dtype
        self._replaced.clear()
        self._masters.clear()

    def _take_master(self, parameter: nn.Parameter) -> Tensor:
        """Where a value was changed since it was rounded, such as by a hook, the new value is the master weight."""
        low, master = parameter.data, self._masters.pop(parameter, None)
        return low.float() if master is None else torch.where(master.to(low.dtype) == low, master, low)


def _widen_states(optimizer: Optimizer) -> None:
    """Let the states that it has made already be fp32.

    Raises:
        UnsupportedError: its step can't be made to use master weights.
    """
    if isinstance(optimizer, LBFGS) or not isinstance(optimizer, Optimizer):
        raise UnsupportedError(
            f"master_weights='fp32' can't be used with {type(optimizer).__name__}, which runs the closure several "
            f"times in a step, or isn't a torch.optim.Optimizer. Use AdamW, say, or leave the option out."
        )
    for state in optimizer.state.values():
        state.update({name: _wide(value) for name, value in state.items()})


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value
