"""The optimizers of a training on one rank: what they update, what user code sees of their states, how a step ends.

master weights, own rows of parameters, host memory     `StepValues`, as the options say
whole parameters, for optimizers that need them         `OptimizerOwners`, in a cube or if optimizers are sharded
optimizer.state in user code                            `GuardedStates`, where ranks hold parts
parameters after a step                                 gathered in the background, until somebody reads them
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport
from lightning_hanayo.strategy.lightning import state, user_hooks
from lightning_hanayo.strategy.optimizer.guarded_states import GuardedStates, RefusedStates
from lightning_hanayo.strategy.optimizer.shards import OptimizerOwners, OptimizerShards
from lightning_hanayo.strategy.optimizer.step_values import StepValues
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.strategy.setup.optimizers import is_elementwise
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis
from lightning_hanayo.topology import AXES


@dataclass(eq=False, repr=False)
class OptimizerSteps:
    """Made when the model is set up. Its methods are called by all ranks of the world."""

    run: Run
    """of the Trainer"""
    cube: Cube | None
    """None without one"""
    shards: OptimizerShards | None
    """how the optimizer is sharded over the data ranks; None if it isn't"""
    names: Mapping[Tensor, str]
    """of the module's parameters, and of those that it had and optimizers may still have"""
    finish_gather: Callable[[], None]
    """waits until all parameters are as the last step has left them"""

    def __post_init__(self) -> None:
        self._values: StepValues | None = None
        self._owners: OptimizerOwners | None = None
        self._all_ranks: ProcessGroupTransport | None = None
        self._states: list[GuardedStates | RefusedStates] = []
        self._is_read = False
        self._gathers_at_once = False
        self._num_optimized = -1
        """how many parameters the optimizers had when they were last checked"""
        self.run.guard.before_user_code = self._before_user_code
        self.run.guard.after_user_code = self._after_user_code

    @property
    def sharding(self) -> Cube | OptimizerShards | None:
        """How the optimizers' states are sharded; None: those that a rank has are whole."""
        return None if self._owners is not None else self.shards or self.cube

    @property
    def sharding_in_use(self) -> Cube | OptimizerShards | None:
        """How parameters are sharded inside `master_values`."""
        return (None if self._values is None else self._values.sharding) or self.cube

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the optimizers update own rows of parameters, and fp32 copies, if the options say so."""
        options, module = self.run.options, self.run.module
        has_masters, offloads = options.master_weights is not None, options.offload_optimizer
        is_cut = self.shards is not None or self.cube is not None
        if is_cut and not all(map(is_elementwise, optimizers)):
            self._owners = self._deal(optimizers)
            if self.shards is not None:
                self.shards.keep_whole()
        for optimizer in optimizers if self._owners is not None or self.shards is not None else ():
            if isinstance(optimizer, Optimizer):
                optimizer.register_state_dict_pre_hook(self._check_reading)
        if has_masters or offloads or self.shards is not None or self._owners is not None:
            self._values = StepValues(
                module.parameters(),
                optimizers,
                self.shards,
                self._owners,
                has_masters=has_masters,
                in_host_memory=offloads,
            )
            self.run.parts.add(self._values.close, self._values.abandon)
            averages = bool(user_hooks.averaging_callbacks(self.run.trainer))
            self._gathers_at_once = averages or not module.automatic_optimization

    def guard_states(self, optimizers: Sequence[Any]) -> None:
        """Let user code find the states of these optimizers guarded from now on. Called while none runs."""
        plain: list[Any] = [one for one in map(state.unwrapped, optimizers) if isinstance(vars(one).get("state"), dict)]
        is_cut = self.shards is not None or self.run.topology.replica_size > 1
        if is_cut and plain != [states.optimizer for states in self._states]:
            self._states = [
                RefusedStates(one)
                if self._owners is not None
                else GuardedStates(one, self.run.guard, self.names, self.sharding)
                for one in plain
            ]

    def check(self) -> None:
        """Refuse parameters of optimizers that the run doesn't know. Called before each training batch.

        Looks through them in an epoch's first batch, and when there are more or fewer.
        """
        trainer = self.run.trainer
        self.guard_states(trainer.optimizers)
        groups = [group["params"] for one in trainer.optimizers for group in one.param_groups]
        number = sum(map(len, groups))
        is_free = self.run.topology.world_size == 1 and self.run.options.master_weights is None
        if is_free or (number == self._num_optimized and state.batch_idx(trainer) > 0):
            return
        self._num_optimized = number
        unknown = next((one for group in groups for one in group if one not in self.names), None)
        if unknown is not None:
            names = {parameter: name for name, parameter in self.run.module.named_parameters()}
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
            self.finish_gather()

    def master_values(self) -> AbstractContextManager[None]:
        """Inside it, parameters have the values that the optimizer updates."""
        return nullcontext() if self._values is None else self._values.in_use()

    @property
    def master_weights(self) -> Sequence[Tensor]:
        """The fp32 copies of parameters."""
        return () if self._values is None else self._values.master_weights

    @property
    def why_no_hooks(self) -> str | None:
        """Why hooks on the optimizers' steps can't run; None: they can."""
        if self._owners is not None:
            return "the rank that updates a parameter has all of it then, and the others have old values"
        return None if self.shards is None else "with shard_optimizer=True it would see some rows of parameters"

    # the states that each rank has

    def updates(self, parameter: Tensor) -> bool:
        """Whether this rank has states of the parameter, or its part of them."""
        return not parameter.is_meta and (self._owners is None or self._owners.owns(parameter))

    @property
    def all_ranks(self) -> ProcessGroupTransport | None:
        """To all ranks of the world, if each parameter's states are on one of them alone."""
        return self._all_ranks

    @contextmanager
    def states_in_use(self) -> Iterator[None]:
        """Inside it, `optimizer.state_dict()` returns the states that this rank has; outside it is refused."""
        self._is_read = True
        try:
            yield
        finally:
            self._is_read = False

    def _check_reading(self, optimizer: Optimizer) -> None:
        if not self._is_read:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.state_dict() has on this rank only the states of the parameters, or of "
                f"the rows of each, that it updates. Call trainer.save_checkpoint(path) on all ranks, which writes all."
            )

    def _deal(self, optimizers: Sequence[Optimizer]) -> OptimizerOwners:
        """Deal the optimizers' parameters over data x cube. Called by all ranks of the world.

        Raises:
            UnsupportedError: an optimizer has made states already, of parts of parameters.
        """
        run = self.run
        groups, topology = run.groups, run.topology
        for one in optimizers:
            values = (value for states in one.state.values() for value in states.values())
            if any(isinstance(value, Tensor) and value.numel() > 1 for value in values):
                raise UnsupportedError(
                    f"{type(one).__name__} makes states when it is constructed, of parameters of which each rank has a "
                    f"part, and it works on whole ones. Let it make them in its first step."
                )
        transport = self._all_ranks = ProcessGroupTransport(
            range(topology.world_size),
            control=groups.factory.control(topology.groups(*AXES)),
            channels={},
            device=torch.device("cpu"),
            on_failure=run.failures.on_transfer,
        )
        run.parts.add(lambda: None, transport.close)
        parameters = [p for one in optimizers for group in one.param_groups for p in group["params"] if not p.is_meta]
        group = groups.metrics
        return OptimizerOwners(
            dict.fromkeys(parameters),
            MeshAxis(group, group.size(), group.rank(), what="whole parameters of an optimizer"),
            groups.factory.control(topology.groups("data", *"xyz")),
            run.device,
            Mesh.single() if self.cube is None else self.cube.mesh,
            None if self.cube is None else self.cube.shard_of,
        )

    def _before_user_code(self) -> None:
        self.finish_gather()
        for states in self._states:
            states.enter()

    def _after_user_code(self) -> None:
        for states in self._states:
            states.leave()
