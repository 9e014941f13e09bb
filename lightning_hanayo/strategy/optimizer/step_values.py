"""What parameters are while an optimizer steps, and while a checkpoint is saved or read.

    forward, backward         whole                        bf16
    optimizer.step()          this data rank's rows        fp32       each if the run has it: shard_optimizer=True,
    a checkpoint              its rows                     fp32       master_weights="fp32"

With offload_optimizer=True the optimizer's step has them in host memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hanayo.strategy.optimizer.master_weights import MasterWeights
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
