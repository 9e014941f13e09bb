"""The optimizers of a training on one rank: what they update, what user code sees of their states, how a step ends.

master weights, own rows of parameters, host memory     `StepValues`, as the options say
whole parameters, for optimizers that need them         `OptimizerOwners`, in a cube or if optimizers are sharded
optimizer.state in user code                            `RefusedStates`, where ranks hold parts
parameters after a step                                 gathered in the background, until somebody reads them

`StepValues`: the values of parameters while an optimizer steps, and a checkpoint is saved or read.

    forward, backward     p.data  bf16, whole               p.grad  fp32: micro-batches' gradients are cast, then added
    reductions, clipping                                    p.grad  fp32
    optimizer.step()      p.data  fp32 master, own rows     p.grad  fp32: any optimizer makes fp32 states
                          or of whole parameters: those that this rank owns
    a checkpoint          p.data  fp32 master, own rows
    afterwards            p.data  bf16, whole, rounded from the master

Masters are there with master_weights="fp32", own rows of a data rank with shard_optimizer=True. With
offload_optimizer=True all parameters have copies in host memory for the step, and gradients are copied there.

The `Parameter` objects stay, so optimizers, param groups, schedulers and checkpoints need know nothing of it.

`OptimizerOwners`: whole parameters on the ranks of data x cube, for optimizers that compute with rows or matrices.

    W [6, 4] of rank 1, on the cube (1, 2, 1)      rank 0               rank 1
    forward, backward, clipping    p.data, p.grad  [3, 4], [3, 4]       [3, 4], [3, 4]
    optimizer.step()               p.data, p.grad  [3, 4], None         [6, 4], [6, 4]     gathered by its owner
    afterwards                     p.data, p.grad  [3, 4], [3, 4]       [3, 4], [3, 4]     new values, sent by its owner

The other ranks' optimizers pass it over, as it has no gradient there, and so only its owner has states of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport
from lightning_hanayo.strategy.lightning import state, user_hooks
from lightning_hanayo.strategy.optimizer_shards import OptimizerShards, set_values
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.setup.optimizers import is_elementwise
from lightning_hanayo.strategy.setup.prepared_model import Cube
from lightning_hanayo.tensor_parallel.mesh import MeshAxis
from lightning_hanayo.tensor_parallel.sharding import Shard
from lightning_hanayo.topology import AXES

ShapeAndType = tuple[tuple[int, ...], torch.dtype]


class OptimizerOwners:
    """The owners of one pipeline rank's parameters. All ranks of data x cube call its methods alike.

    Args:
        run: of the Trainer.
        parameters: of all optimizers, those of other pipeline ranks left out.
    """

    def __init__(self, run: Run, parameters: Iterable[nn.Parameter]) -> None:
        group, self._device, self._mesh, self._shard_of = run.groups.metrics, run.device, run.mesh, run.shard_of
        self._axis = MeshAxis(group, group.size(), group.rank(), what="whole parameters of an optimizer")
        """these ranks, those of a cube next to each other"""
        self._control: Any = run.groups.factory.control(run.topology.groups("data", *"xyz"))
        """the same, for tensors in host memory (gloo); None after a failure"""
        self._owners: dict[Tensor, int] = {}
        self._loads = [0] * self._axis.size
        self._replaced: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        self._deal(parameters)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates the parameter, and has its states."""
        return self._owners.get(parameter) == self._axis.rank

    def put_in(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before an optimizer's step: those that this rank owns are whole, the others have no gradient."""
        self._deal(parameters)
        present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        dist.all_reduce(present, dist.ReduceOp.MIN, group=self._control)  # whether all ranks have a gradient of it
        trained = [one for one, is_present in zip(parameters, present.tolist(), strict=True) if is_present]
        self._replaced = {parameter: (parameter.data, parameter.grad) for parameter in trained}
        sent: list[list[Tensor]] = [[] for _ in range(self._axis.size)]
        expected: list[list[ShapeAndType]] = [[] for _ in range(self._axis.size)]
        for parameter, (data, gradient) in self._replaced.items():
            assert gradient is not None
            shard, owner = self._shard_of(parameter), self._owners[parameter]
            sources = self._sources(shard, owner)
            if self._axis.rank in sources:
                sent[owner] += [data, gradient]
            for rank in sources if self.owns(parameter) else ():
                shape = shard.local_shape(self._mesh, self._place(rank))
                expected[rank] += [(shape, data.dtype), (shape, gradient.dtype)]
        received = self._exchange(sent, expected)
        for parameter, (data, gradient) in self._replaced.items():
            assert gradient is not None
            parameter.grad = None
            if self.owns(parameter):
                shard = self._shard_of(parameter)
                sources = self._sources(shard, self._axis.rank)
                if sources:
                    data, gradient = (one.new_empty(shard.shape) for one in (data, gradient))
                for rank in sources:
                    for whole in (data, gradient):
                        shard.put(whole, next(received[rank]), self._mesh, self._place(rank))
                set_values(parameter, data, gradient)

    def take_out(self) -> None:
        """After the step: each rank's own part again, with the values that the owners have given it."""
        sent: list[list[Tensor]] = [[] for _ in range(self._axis.size)]
        expected: list[list[ShapeAndType]] = [[] for _ in range(self._axis.size)]
        for parameter, (data, _) in self._replaced.items():
            expected[self._owners[parameter]].append((tuple(data.shape), data.dtype))
            if self.owns(parameter):
                shard = self._shard_of(parameter)
                for rank, own in enumerate(sent):
                    own.append(shard.of(parameter.data, self._mesh, self._place(rank)))
        received = self._exchange(sent, expected)
        owners, replaced = self._owners, list(self._replaced)
        self._put_back()
        with torch.no_grad():
            for parameter in replaced:  # not its data: all ranks have to see that its version has changed
                parameter.copy_(next(received[owners[parameter]]))

    def abandon(self) -> None:
        """The run has failed: each rank's own part, and no groups."""
        self._put_back()
        self._control = None
        self._axis.disconnect("the run has failed. Build the model anew, and load a checkpoint.")

    def _put_back(self) -> None:
        for parameter, (data, gradient) in self._replaced.items():
            set_values(parameter, data, gradient)
        self._replaced = {}

    def _deal(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give each new parameter, the largest first, to the rank that has the fewest elements."""
        new = [parameter for parameter in parameters if parameter not in self._owners]
        sizes: Mapping[nn.Parameter, int] = {parameter: prod(self._shard_of(parameter).shape) for parameter in new}
        for parameter in sorted(new, key=lambda one: (not one.requires_grad, -sizes[one])):
            owner = self._owners[parameter] = self._loads.index(min(self._loads))
            self._loads[owner] += sizes[parameter]

    def _sources(self, shard: Shard, owner: int) -> list[int]:
        """The ranks that send the owner its parts, one of each: its own data rank's. None where it has the whole."""
        if self._mesh.size(shard.axes) == 1:
            return []
        first = owner // self._mesh.num_ranks * self._mesh.num_ranks
        others = [i for i, axis in enumerate("xyz") if axis not in shard.axes]
        return [first + i for i, place in enumerate(self._mesh.places) if not any(place[axis] for axis in others)]

    def _place(self, rank: int) -> tuple[int, int, int]:
        return self._mesh.places[rank % self._mesh.num_ranks]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[ShapeAndType]]
    ) -> list[Iterator[Tensor]]:
        """Send each rank its tensors, as one message of bytes; return those that each rank has sent."""
        at_step = next((data.device for data, _ in self._replaced.values()), self._device)  # maybe host memory
        empty = torch.empty(0, dtype=torch.uint8, device=at_step)
        parts = [torch.cat([empty, *map(_as_bytes, tensors)]).to(self._device) for tensors in sent]
        sizes = [[prod(shape) * dtype.itemsize for shape, dtype in tensors] for tensors in expected]
        lengths = [sum(one) for one in sizes]
        rows = self._axis.exchange_rows(torch.cat(parts), [len(part) for part in parts], lengths).wait()
        received = rows.to(at_step).split(lengths)
        return [
            # a copy, as memory for numbers of several bytes has to be aligned
            (part.clone().view(dtype).view(shape) for part, (shape, dtype) in zip(one.split(own), tensors, strict=True))
            for one, own, tensors in zip(received, sizes, expected, strict=True)
        ]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class RefusedStates(MutableMapping[Any, Any]):
    """Takes the place of `optimizer.state` between `enter` and `leave`: no user code may use the states.

    No rank has those of all parameters. Optimizers find their plain states when they step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        """torch's, not Lightning's"""
        self._own: Any = optimizer.state

    def enter(self) -> None:
        """User code begins, or goes on."""
        if self.optimizer.state is not self:
            self._own, self.optimizer.state = self.optimizer.state, self  # type: ignore[assignment]

    def leave(self) -> None:
        """User code has ended.

        Raises:
            UnsupportedError: it has loaded other states.
        """
        left: Any = self.optimizer.state
        self.optimizer.state = self._own
        if left is not self and left is not self._own:
            self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(
            f"each rank has the states of {type(self.optimizer).__name__} for its own parameters, or parts of them: "
            "optimizer.state can't be used here. trainer.save_checkpoint(path) on all ranks writes all of them."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse


@dataclass(eq=False, repr=False)
class OptimizerSteps:
    """Made when the model is set up. Its methods are called by all ranks of the world."""

    run: Run
    """of the Trainer"""
    shards: OptimizerShards | None
    """how the optimizer is sharded over the data ranks; None if it isn't"""
    names: Mapping[Tensor, str]
    """of the module's parameters, and of those that it had and optimizers may still have"""

    def __post_init__(self) -> None:
        self._values: StepValues | None = None
        self._owners: OptimizerOwners | None = None
        self.all_ranks: ProcessGroupTransport | None = None
        """to all ranks of the world, if each parameter's states are on one of them alone"""
        self._states: list[RefusedStates] = []
        self._gathers_at_once = False
        self._num_optimized = -1
        """how many parameters the optimizers had when they were last checked"""
        self._is_cut = self.shards is not None or self.run.topology.replica_size > 1
        """whether this rank has a part of the states, or those of some parameters"""
        self.run.guard.before_user_code = self._before_user_code
        self.run.guard.after_user_code = self._after_user_code

    @property
    def sharding(self) -> Cube | OptimizerShards | None:
        """How the optimizers' states are sharded; None: those that a rank has are whole."""
        return None if self._owners is not None else self.shards or self.run.cube

    @property
    def sharding_in_use(self) -> Cube | OptimizerShards | None:
        """How parameters are sharded inside `master_values`."""
        has_masters = self._values is not None and self.run.options.master_weights is not None
        return (self.shards if has_masters else None) or self.run.cube

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the optimizers update own rows of parameters, and fp32 copies, if the options say so."""
        copies = self.run.options.master_weights is not None or self.run.options.offload_optimizer
        has_parts = self.shards is not None or self.run.cube is not None
        if has_parts and not all(map(is_elementwise, optimizers)):
            self._owners = self._deal(optimizers)
            if self.shards is not None:
                self.shards.keep_whole()
        for optimizer in optimizers if self._is_cut else ():
            if isinstance(optimizer, Optimizer):
                optimizer.register_state_dict_pre_hook(_check_reading)
        if copies or self.shards is not None or self._owners is not None:
            self._values = StepValues(self.run, optimizers, self.shards, self._owners)
            self.run.parts.add(self._values.close, self._values.abandon)
            averages = bool(user_hooks.averaging_callbacks(self.run.trainer))
            self._gathers_at_once = averages or not self.run.module.automatic_optimization

    def guard_states(self, optimizers: Sequence[Any]) -> None:
        """From now on user code can't use the states of these optimizers, if they are cut. Called while none runs."""
        plain: list[Any] = [one for one in map(state.unwrapped, optimizers) if isinstance(vars(one).get("state"), dict)]
        if self._is_cut and plain != [states.optimizer for states in self._states]:
            self._states = list(map(RefusedStates, plain))

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
                f"an optimizer has a parameter of the shape {list(unknown.shape)}, {name}, of which not all ranks "
                "know, or that was made too late for shard_optimizer, master_weights or offload_optimizer. Make it a "
                "parameter of the module in __init__ or setup, or without these options in a hook that runs on all "
                "ranks."
            )

    def end_step(self) -> None:
        """Called after each step of an optimizer: the next code that reads parameters may not wait for them."""
        if self._gathers_at_once:
            self.run.pipeline.gradients.finish_gather()

    def master_values(self) -> AbstractContextManager[None]:
        """Inside it, parameters have the values that the optimizer updates."""
        return nullcontext() if self._values is None else self._values.in_use()

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

    def _deal(self, optimizers: Sequence[Optimizer]) -> OptimizerOwners:
        """Deal the optimizers' parameters over data x cube. Called by all ranks of the world.

        Raises:
            UnsupportedError: an optimizer has made states already, of parts of parameters.
        """
        run, topology = self.run, self.run.topology
        for one in optimizers:
            values = (value for states in one.state.values() for value in states.values())
            if any(isinstance(value, Tensor) and value.numel() > 1 for value in values):
                raise UnsupportedError(
                    f"{type(one).__name__} makes states when it is constructed, of parameters of which each rank has a "
                    f"part, and it works on whole ones. Let it make them in its first step."
                )
        transport = self.all_ranks = ProcessGroupTransport(
            range(topology.world_size),
            control=run.groups.factory.control(topology.groups(*AXES)),
            channels={},
            device=torch.device("cpu"),
            on_failure=run.failures.on_transfer,
        )
        run.parts.add(lambda: None, transport.close)
        parameters = [p for one in optimizers for group in one.param_groups for p in group["params"] if not p.is_meta]
        return OptimizerOwners(run, dict.fromkeys(parameters))

    def _before_user_code(self) -> None:
        self.run.pipeline.gradients.finish_gather()
        for states in self._states:
            states.enter()

    def _after_user_code(self) -> None:
        for states in self._states:
            states.leave()


_IS_READ = "_hanayo_is_read"


@contextmanager
def reading_states(optimizer: Optimizer) -> Iterator[None]:
    """Inside it, `optimizer.state_dict()` returns the states that this rank has; outside it is refused.

    The hook that refuses stays on the optimizer after its run.
    """
    vars(optimizer)[_IS_READ] = True
    try:
        yield
    finally:
        del vars(optimizer)[_IS_READ]


def _check_reading(optimizer: Optimizer) -> None:
    if _IS_READ not in vars(optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__}.state_dict() has on this rank only the states of what it updates: some "
            "parameters, or parts of each. Call trainer.save_checkpoint(path) on all ranks, which writes all of them."
        )


_LOW = (torch.bfloat16, torch.float16)


class StepValues:
    """Puts these values into the parameters of one rank, for one run.

    Args:
        run: whose options say whether parameters in bf16 or fp16 get master weights, and whether optimizers step in
            host memory.
        optimizers: of the run.
        shards: own rows; None if optimizers aren't sharded.
        owners: of whole parameters; None if optimizers don't need them.

    Raises:
        HanayoError: master weights, but no parameter is in bf16 or fp16.
        UnsupportedError: an optimizer whose step can't be made to use these values.
    """

    def __init__(
        self, run: Run, optimizers: Sequence[Any], shards: OptimizerShards | None, owners: OptimizerOwners | None
    ) -> None:
        self.shards, self._owners, self._optimizers = shards, owners, list(optimizers)
        parameters = list(run.module.parameters())  # other ranks' placeholders included
        self._held = [parameter for parameter in parameters if not parameter.is_meta]
        self._has_masters, self._in_host_memory = run.options.master_weights is not None, run.options.offload_optimizer
        self._low = [parameter for parameter in parameters if self._has_masters and parameter.dtype in _LOW]
        self._masters: dict[nn.Parameter, Tensor] = {}
        """fp32 copies, and those in host memory"""
        self._replaced: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        self._is_in = False
        if self._has_masters and not self._low:
            raise HanayoError(
                "master_weights='fp32' is for parameters in bf16 or fp16, but the module has none. Set "
                "Trainer(precision='bf16-true'), or leave it out: with 'bf16-mixed' the parameters are in fp32 already."
            )
        for optimizer in optimizers if self._has_masters or self._in_host_memory else ():
            _check(optimizer, "master_weights='fp32'" if self._has_masters else "offload_optimizer=True")
            for states in optimizer.state.values() if self._has_masters else ():  # that it has made already
                low_states = {n: v for n, v in states.items() if isinstance(v, Tensor) and v.dtype in _LOW}
                states.update({name: value.float() for name, value in low_states.items()})
        for parameter in self._low:
            parameter.grad, parameter.grad_dtype = None, torch.float32
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
        masters = {parameter: master.cpu() for parameter, master in self._masters.items()}
        self._detach()
        self._masters = masters

    def abandon(self) -> None:
        """The run has failed: whole parameters as before a failed step, no master weights, and no groups.

        Computes nothing: a device that has failed can't.
        """
        if self._owners is not None:
            self._owners.abandon()
        self._detach()
        if self.shards is not None:
            self.shards.abandon()

    def _detach(self) -> None:
        for parameter, (low, _) in self._replaced.items():
            set_values(parameter, low, None)
        for parameter in self._low:
            parameter.grad, parameter.grad_dtype = None, parameter.dtype
        self._replaced.clear()
        self._masters.clear()
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
        """Let parameters be own rows, and have the copies' values, if they are trained, and have copies."""
        self._is_in = True
        if self.shards is not None:
            self.shards.put_in(held)
        for parameter in trained:
            is_low = self._has_masters and parameter.dtype in _LOW
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

    def _take_out(self, *, gathers: bool) -> None:
        """Round the master weights into the memory that the parameters had, which layers may know."""
        for parameter, (low, gradient) in self._replaced.items():
            self._masters[parameter] = parameter.data
            set_values(parameter, low.copy_(parameter.data), gradient)
        self._replaced.clear()
        if self.shards is not None:
            self.shards.take_out(gathers=gathers)
        self._is_in = False

    @staticmethod
    def _trained(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
        """The parameters of this rank that the optimizers have now."""
        parameters = (p for one in optimizers for group in one.param_groups for p in group["params"])
        return list(dict.fromkeys(p for p in parameters if not p.is_meta))


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
