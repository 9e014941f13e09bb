"""The values of parameters while an optimizer steps, and while a checkpoint is saved or read.

    forward, backward     p.data  bf16, whole               p.grad  fp32: micro-batches' gradients are cast, then added
    reductions, clipping                                    p.grad  fp32
    optimizer.step()      p.data  fp32 master, own rows     p.grad  fp32: any optimizer makes fp32 states
                          or of whole parameters: those that this rank owns
    a checkpoint          p.data  fp32 master, own rows
    afterwards            p.data  bf16, whole, rounded from the master

Masters are there with master_weights="fp32", own rows of a data rank with shard_optimizer=True. With
offload_optimizer=True all parameters have copies in host memory for the step, and gradients are copied there.

The `Parameter` objects stay, so optimizers, param groups, schedulers and checkpoints need know nothing of it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.strategy.optimizer.shards import OptimizerOwners, OptimizerShards, set_values


class StepValues:
    """Puts these values into the parameters of one rank, for one run.

    Args:
        parameters: all of the module's, other ranks' placeholders included.
        optimizers: of the run.
        shards: own rows; None if optimizers aren't sharded.
        owners: of whole parameters; None if optimizers don't need them.
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
        owners: OptimizerOwners | None = None,
        *,
        has_masters: bool,
        in_host_memory: bool = False,
    ) -> None:
        self.shards = shards
        self._owners = owners
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
                optimizer.register_step_post_hook(self._after_step),
            )
        ]
        with self.in_use():
            pass  # makes master weights now, so that a lack of memory shows before the first batch

    @property
    def sharding(self) -> OptimizerShards | None:
        """How parameters are sharded inside `in_use`, if not only over a cube."""
        return self.shards if self._has_masters else None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside it, parameters have the master weights' values, own rows of them; values written there are kept."""
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
        if self._owners is not None:
            self._owners.abandon()
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
        if self._owners is not None:
            self._owners.put_in(trained)
        return (optimizer, *positional), kwargs

    def _after_step(self, *_: Any) -> None:
        if self._owners is not None:
            self._owners.take_out()
        self._take_out(gathers=True)

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
            for states in optimizer.state.values() if low else ():  # that it has made already
                low_states = {n: v for n, v in states.items() if isinstance(v, Tensor) and v.dtype in _LOW}
                states.update({name: value.float() for name, value in low_states.items()})
        for parameter in self._low:
            parameter.grad, parameter.grad_dtype = None, torch.float32

    def put_in(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let these parameters have the copies' values, if they are trained, and have copies."""
        has_masters = bool(self._low)
        for parameter in parameters:
            is_low = has_masters and parameter.dtype in _LOW
            if parameter.requires_grad and (is_low or self._in_host_memory):  # more may be added, or unfrozen
                gradient, low = parameter.grad, parameter.data
                self._replaced[parameter] = low, gradient
                master = self._masters.pop(parameter, None)
                low = low.cpu() if self._in_host_memory else low
                if master is None or master.dtype is low.dtype:
                    master = low.to(torch.float32 if is_low else low.dtype, copy=True)
                else:  # where a value was changed since it was rounded, such as by a hook, it is the master weight
                    master = torch.where(master.to(low.dtype) == low, master, low)
                set_values(parameter, master, None if gradient is None else gradient.to(master.device))

    def take_out(self) -> None:
        """Round the master weights into the memory that the parameters had, which layers may know."""
        for parameter, (low, gradient) in self._replaced.items():
            self._masters[parameter] = parameter.data
            set_values(parameter, low.copy_(parameter.data), gradient)
        self._replaced.clear()

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
            set_values(parameter, low, None)
        for parameter in self._low:
            parameter.grad, parameter.grad_dtype = None, parameter.dtype
        self._replaced.clear()
        self._masters.clear()


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
