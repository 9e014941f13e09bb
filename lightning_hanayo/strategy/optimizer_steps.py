"""The optimizers of a training on one rank: what they update, what user code sees of their states, how a step ends.

master weights, own rows of parameters, host memory     `StepValues`, as the options say
optimizer.state in user code                            `GuardedStates`, where ranks hold parts
parameters after a step                                 gathered in the background, until somebody reads them
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.lightning import state, user_hooks
from lightning_hanayo.strategy.optimizer.guarded_states import GuardedStates
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards
from lightning_hanayo.strategy.optimizer.step_values import StepValues
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.setup.cube import Cube


class OptimizerSteps:
    """Made when the model is set up. Its methods are called by all ranks of the world.

    Args:
        run: of the Trainer.
        cube: None without one.
        shards: how the optimizer is sharded over the data ranks; None if it isn't.
        names: of the module's parameters, and of those that it had and optimizers may still have.
        finish_gather: waits until all parameters are as the last step has left them.
    """

    def __init__(
        self,
        run: Run,
        cube: Cube | None,
        shards: OptimizerShards | None,
        names: Mapping[Tensor, str],
        finish_gather: Callable[[], None],
    ) -> None:
        self.shards = shards
        self._run = run
        self._cube = cube
        self._names = names
        self._finish_gather = finish_gather
        self._values: StepValues | None = None
        self._states: list[GuardedStates] = []
        self._gathers_at_once = False
        self._num_optimized = -1
        """how many parameters the optimizers had when they were last checked"""
        run.guard.before_user_code = self._before_user_code
        run.guard.after_user_code = self._after_user_code

    @property
    def sharding(self) -> Cube | OptimizerShards | None:
        """How the optimizers' states are sharded."""
        return self.shards or self._cube

    @property
    def sharding_in_use(self) -> Cube | OptimizerShards | None:
        """How parameters are sharded inside `master_values`."""
        return (None if self._values is None else self._values.sharding) or self._cube

    def prepare(self, module: "pl.LightningModule", optimizers: Sequence[Optimizer]) -> None:
        """Let the optimizers update own rows of parameters, and fp32 copies, if the options say so."""
        options = self._run.options
        has_masters, offloads = options.master_weights is not None, options.offload_optimizer
        if has_masters or offloads or self.shards is not None:
            self._values = StepValues(
                module.parameters(), optimizers, self.shards, has_masters=has_masters, in_host_memory=offloads
            )
            self._run.parts.add(self._values.close, self._values.abandon)
            averages = bool(user_hooks.averaging_callbacks(module.trainer))
            self._gathers_at_once = averages or not module.automatic_optimization

    def guard_states(self, optimizers: Sequence[Any]) -> None:
        """Let user code find the states of these optimizers guarded from now on. Called while none runs."""
        plain: list[Any] = [one for one in map(state.unwrapped, optimizers) if isinstance(vars(one).get("state"), dict)]
        is_cut = self.shards is not None or self._run.topology.replica_size > 1
        if is_cut and plain != [states.optimizer for states in self._states]:
            self._states = [GuardedStates(one, self._run.guard, self._names, self.sharding) for one in plain]

    def check(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        """Refuse parameters of optimizers that the run doesn't know. Called before each training batch.

        Looks through them in an epoch's first batch, and when there are more or fewer.
        """
        self.guard_states(trainer.optimizers)
        groups = [group["params"] for one in trainer.optimizers for group in one.param_groups]
        number = sum(map(len, groups))
        is_free = self._run.topology.world_size == 1 and self._run.options.master_weights is None
        if is_free or (number == self._num_optimized and state.batch_idx(trainer) > 0):
            return
        self._num_optimized = number
        unknown = next((one for group in groups for one in group if one not in self._names), None)
        if unknown is not None:
            names = {parameter: name for name, parameter in module.named_parameters()}
            name = names.get(unknown, "which isn't one of the LightningModule's")
            raise UnsupportedError(
                f"an optimizer has a parameter of the shape {list(unknown.shape)}, {name}, which this run can't train: "
                f"it was not made where all ranks know of it, it is a copy of a parameter of another rank, or with "
                f"shard_optimizer, master_weights or offload_optimizer it was made too late. Make it a parameter of "
                f"the module in __init__ or setup; or without these options in a hook that runs on all ranks, such as "
                f"on_fit_start, where full_parameter returns the values of others."
            )

    def end_step(self) -> None:
        """Called after each step of an optimizer: the next code that reads parameters may not wait for them."""
        if self._gathers_at_once:
            self._finish_gather()

    def master_values(self) -> AbstractContextManager[None]:
        """Inside it, parameters have the values that the optimizer updates."""
        return nullcontext() if self._values is None else self._values.in_use()

    @property
    def master_weights(self) -> Sequence[Tensor]:
        """The fp32 copies of parameters."""
        return () if self._values is None else self._values.master_weights

    def _before_user_code(self) -> None:
        self._finish_gather()
        for states in self._states:
            states.enter()

    def _after_user_code(self) -> None:
        for states in self._states:
            states.leave()
