"""What parameters are while an optimizer steps, and while a checkpoint is saved or read.

    forward, backward         whole                        bf16
    optimizer.step()          this data rank's rows        fp32       each if the run has it: shard_optimizer=True,
    a checkpoint              its rows                     fp32       master_weights="fp32"

With offload_optimizer=True the optimizer's step has them in host memory.

fp32 gradients, and fp32 master weights for the optimizer, of parameters in bf16 or fp16.

    forward, backward     p.data  bf16          p.grad  fp32: each micro-batch's gradient is cast, then added
    reductions, clipping                        p.grad  fp32
    optimizer.step()      p.data  fp32 master   p.grad  fp32: any optimizer finds fp32 parameters, and makes fp32 states
    afterwards            p.data  bf16, rounded from the master

With `in_host_memory` the optimizer steps there: all parameters have copies in host memory, low ones fp32 masters, and
gradients are copied for the step. So states are made there.

The `Parameter` objects stay, so optimizers, param groups, schedulers and checkpoints need know nothing of it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards


class StepValues:
    """Those of one rank, for one run.

    Args:
        parameters: all of the module's, other ranks' placeholders included.
        optimizers: of the run.
        shards: own rows; None if optimizers aren't sharded.
        has_masters: whether parameters in bf16 or fp16 get master weights.
        in_host_memory: whether optimizers step there.

    Raises:
        HanayoError: master weights, but no parameter is in bf16 or fp16.
        UnsupportedError: an optimizer whose step can't be made to use these values.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizers: Sequence[Any],
        shards: OptimizerShards | None,
        *,
        has_masters: bool,
        in_host_memory: bool = False,
    ) -> None:
        self.shards = shards
        listed = list(parameters)
        self._held = [parameter for parameter in listed if not parameter.is_meta]
        self._optimizers = list(optimizers)
        self._has_masters = has_masters
        self._masters: MasterWeights | None = None
        if has_masters or in_host_memory:
            self._masters = MasterWeights(listed, optimizers, low=has_masters, in_host_memory=in_host_memory)
        self._is_in = False
        if shards is not None:
            shards.attach(optimizers)
        self._hooks = [
            handle
            for optimizer in self._optimizers
            if isinstance(optimizer, Optimizer)
            for handle in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(lambda *_: self._take_out(gathers=True)),
            )
        ]
        with self.in_use():
            pass  # makes master weights now, so that a lack of memory shows before the first batch

    @property
    def sharding(self) -> OptimizerShards | None:
        """How parameters are sharded inside `in_use`, if not only over a cube."""
        return self.shards if self._has_masters else None

    @property
    def master_weights(self) -> list[Tensor]:
        """The fp32 copies of parameters."""
        return [] if self._masters is None else self._masters.tensors

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside it, parameters have the master weights' values, own rows of them, and what is written is kept."""
        if self.shards is not None:
            self.shards.finish()
        if self._is_in or not self._has_masters:  # a hook in the optimizer's step saves a checkpoint
            yield
            return
        self._put_in(self._held, self._trained(self._optimizers))
        try:
            yield
        finally:
            self._take_out(gathers=False)

    def close(self) -> None:
        """The run has ended: free gradients, and keep the master weights in host memory, for checkpoints."""
        if self.shards is not None:
            self.shards.finish()
        if self._masters is not None:
            self._masters.close()
        self._detach()

    def abandon(self) -> None:
        """The run has failed: whole parameters, no master weights, and no groups. Computes nothing."""
        if self._masters is not None:
            self._masters.abandon()
        if self.shards is not None:
            self.shards.abandon()
        self._detach()

    def _detach(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the closure first, as it runs forward and backward, for which the parameters have to be whole."""
        optimizer, *positional = args
        closure: Callable[[], Any] | None = positional[0] if positional else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            positional, kwargs = [lambda: result, *positional[1:]], {k: v for k, v in kwargs.items() if k != "closure"}
        trained = self._trained([optimizer])
        self._put_in(trained, trained)
        return (optimizer, *positional), kwargs

    def _put_in(self, held: Sequence[nn.Parameter], trained: Sequence[nn.Parameter]) -> None:
        self._is_in = True
        if self.shards is not None:
            self.shards.put_in(held)
        if self._masters is not None:
            self._masters.put_in(trained)

    def _take_out(self, *, gathers: bool) -> None:
        if self._masters is not None:
            self._masters.take_out()
        if self.shards is not None:
            self.shards.take_out(gathers=gathers)
        self._is_in = False

    @staticmethod
    def _trained(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
        """The parameters of this rank that the optimizers have now."""
        parameters = (p for one in optimizers for group in one.param_groups for p in group["params"])
        return list(dict.fromkeys(p for p in parameters if not p.is_meta))


_LOW = (torch.bfloat16, torch.float16)


class MasterWeights:
    """The master weights of one rank, for one run.

    Args:
        parameters: all of the module's, other ranks' placeholders included.
        optimizers: whose parameters get master weights.
        low: whether parameters in bf16 or fp16 get them.
        in_host_memory: whether all get copies there.

    Raises:
        HanayoError: `low`, and no parameter is in bf16 or fp16.
        UnsupportedError: an optimizer whose step can't be made to use them.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizers: Sequence[Optimizer],
        *,
        low: bool = True,
        in_host_memory: bool = False,
    ) -> None:
        self._low = [parameter for parameter in parameters if low and parameter.dtype in _LOW]
        self._in_host_memory = in_host_memory
        self._masters: dict[nn.Parameter, Tensor] = {}
        self._replaced: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        if low and not self._low:
            raise HanayoError(
                "master_weights='fp32' is for parameters in bf16 or fp16, but the module has none. Set "
                "Trainer(precision='bf16-true'), or leave it out: with 'bf16-mixed' the parameters are in fp32 already."
            )
        for optimizer in optimizers:
            _check(optimizer, "master_weights='fp32'" if low else "offload_optimizer=True")
            if low:
                _widen_states(optimizer)
        for parameter in self._low:
            parameter.grad, parameter.grad_dtype = None, torch.float32

    def put_in(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let these parameters have the copies' values, if they are trained, and have copies."""
        has_masters = bool(self._low)
        for parameter in parameters:
            is_low = has_masters and parameter.dtype in _LOW
            if parameter.requires_grad and (is_low or self._in_host_memory):  # more may be added, or unfrozen
                gradient = parameter.grad
                self._replaced[parameter] = parameter.data, gradient
                master = self._take_master(parameter, torch.float32 if is_low else parameter.dtype)
                parameter.grad = None
                parameter.data = master
                parameter.grad = None if gradient is None else gradient.to(master.device)

    def take_out(self) -> None:
        """Round the master weights into the memory that the parameters had, which layers may know."""
        for parameter, (low, gradient) in self._replaced.items():
            self._masters[parameter] = parameter.data
            parameter.grad = None
            parameter.data = low.copy_(parameter.data)
            parameter.grad = gradient
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
        for parameter, (low, _) in self._replaced.items():
            parameter.grad = None
            parameter.data = low
        for parameter in self._low:
            parameter.grad, parameter.grad_dtype = None, parameter.dtype
        self._replaced.clear()
        self._masters.clear()

    def _take_master(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Where a value was changed since it was rounded, such as by a hook, the new value is the master weight."""
        low, master = parameter.data, self._masters.pop(parameter, None)
        if self._in_host_memory:
            low = low.cpu()
        if master is None or master.dtype is low.dtype:
            return low.to(dtype, copy=True)
        return torch.where(master.to(low.dtype) == low, master, low)


def _check(optimizer: Any, option: str) -> None:
    """Check that its step can be made to use other values.

    Raises:
        UnsupportedError: it can't.
    """
    if isinstance(optimizer, LBFGS) or not isinstance(optimizer, Optimizer):
        raise UnsupportedError(
            f"{option} can't be used with {type(optimizer).__name__}, which runs the closure several times in a step, "
            f"or isn't a torch.optim.Optimizer. Use AdamW, say, or leave the option out."
        )
    if option.startswith("offload") and any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedError(
            f"offload_optimizer=True steps {type(optimizer).__name__} in host memory, and fused=True reads flags on "
            f"the device. Leave one of them out."
        )


def _widen_states(optimizer: Optimizer) -> None:
    """Let the states that it has made already be fp32."""
    for state in optimizer.state.values():
        state.update({name: _wide(value) for name, value in state.items()})


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value
