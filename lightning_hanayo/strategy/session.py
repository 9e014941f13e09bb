"""One run of the Trainer on one rank: connections to other ranks, the pipeline, and what is changed for the run."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any, Literal, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer

from lightning_hanayo.errors import UnsupportedError, available
from lightning_hanayo.partition import guards
from lightning_hanayo.partition.guards import ParameterGuard
from lightning_hanayo.partition.stack import modules_outside
from lightning_hanayo.pipeline_parallel.comm.object_collectives import all_gather_objects, broadcast_object
from lightning_hanayo.pipeline_parallel.first_batch import FirstBatch
from lightning_hanayo.pipeline_parallel.microbatches import PieceSizes
from lightning_hanayo.pipeline_parallel.nan import MadeValues
from lightning_hanayo.pipeline_parallel.rng import RandomStreams, SharedGenerators, next_number
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport, Relay, Transport
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.schedule import Action
from lightning_hanayo.seeds import seed_of
from lightning_hanayo.strategy import callbacks, guarded_hooks, norms, votes
from lightning_hanayo.strategy.batch_split import SplitBatch
from lightning_hanayo.strategy.callbacks import Averages
from lightning_hanayo.strategy.checkpoints.kept_values import KeptValues
from lightning_hanayo.strategy.failure import Failures
from lightning_hanayo.strategy.groups import ProcessGroups, broadcast_values
from lightning_hanayo.strategy.hangs import HangWatch, OwnStatus
from lightning_hanayo.strategy.lightning import inspection, loaders, metrics, state, user_hooks
from lightning_hanayo.strategy.lightning.loops import before_validations, keep_inference_mode
from lightning_hanayo.strategy.lightning.metrics import GivenBatchSizes
from lightning_hanayo.strategy.losses.loss_watch import LossWatch
from lightning_hanayo.strategy.losses.loss_weight import LossWeighting, PieceWeights, for_model
from lightning_hanayo.strategy.losses.step_samples import SampleCount
from lightning_hanayo.strategy.losses.token_losses import TokenLosses, suggest_tokens
from lightning_hanayo.strategy.memory import MemoryReport, RunMemory, not_measured
from lightning_hanayo.strategy.nonfinite import BlockNames, NonFiniteCheck, RankNames
from lightning_hanayo.strategy.norms import GradientNorms
from lightning_hanayo.strategy.optimizer.guarded_states import GuardedStates
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards
from lightning_hanayo.strategy.optimizer.step_values import StepValues
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.setup.build_pipeline import (
    RankContext,
    build_pipeline,
    restore_forwards,
    whole_values,
)
from lightning_hanayo.strategy.setup.checks import run_uncompiled, warn_of_batch_statistics
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.strategy.setup.plan import ModelPlan, plan_for, report_plan
from lightning_hanayo.strategy.setup.prepared_model import PreparedModel
from lightning_hanayo.strategy.setup.values import check_same_folders, was_read
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes
from lightning_hanayo.strategy.user_code import collectives
from lightning_hanayo.strategy.user_code.collected import Collections, warn_of_parts
from lightning_hanayo.strategy.user_code.collectives import Progress, connect_collectives
from lightning_hanayo.strategy.user_code.hand_over import HandOver
from lightning_hanayo.strategy.votes import ReplicaCheck, StepVotes, vote_on_steps
from lightning_hanayo.topology import Topology


class Session:
    """Lives for one fit, validate, test or predict: made when the processes are connected, closed at teardown."""

    def __init__(
        self,
        options: Options,
        topology: Topology,
        groups: ProcessGroups,
        failures: Failures,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self.topology = topology
        self.device = device
        self.failures = failures
        self.attributes = TemporaryAttributes()
        self.guard = ParameterGuard(device)
        self.guard.before_user_code = self._before_user_code
        self.guard.after_user_code = self._after_user_code
        self.pipe_relay = self._relay(groups.pipe_ranks, groups)
        is_cube = prod(topology.cube) > 1
        self.replica_relay = self._relay(groups.replica_ranks, groups) if is_cube else self.pipe_relay
        self.generators = SharedGenerators(self.replica_relay, device)
        self.votes = StepVotes(self.replica_relay, rank, self.guard.off)
        self.rank = rank
        self.samples = SampleCount()
        self.given_batch_sizes = GivenBatchSizes()
        self.values = MadeValues(is_watched=options.nonfinite != "ignore")
        self.seed = 0
        """of the random streams, the same on all ranks"""
        self._options = options
        self._open_groups: ProcessGroups | None = groups
        self._data_rank, self._pipe_rank, *_ = topology.coordinates(rank)
        self._prepared = PreparedModel()
        self.names: dict[Tensor, str] = {}
        """of the module's parameters, and of those that it had and optimizers may still have"""
        self._pipeline: Pipeline | None = None
        self._norms: GradientNorms | None = None
        self._nonfinite: NonFiniteCheck | None = None
        self._replica_check: ReplicaCheck | None = None
        self._loss_watch: LossWatch | None = None
        self.token_losses: TokenLosses | None = None
        """of a cube whose ranks have the same samples"""
        self._has_trained = False
        self._number: int | None = None
        """what torch's generator would have drawn when the run began, if its random numbers depend on that"""
        self._loss_weight = options.loss_weight
        self._collections: Collections | None = None
        self._hand_over: HandOver | None = None
        self._warned: set[str] = set()
        self.progress = Progress(self.failures)
        self.guard.after_step = self.progress.end_step
        shared = prod(topology.cube) if options.cube_outside == "share" else 1
        self.collectives = connect_collectives(self.guard, groups, self.failures, topology.world_size, cube_size=shared)
        self._raw = collectives.Run(self.collectives, topology.pipe, prod(topology.cube))
        self.cube: Cube | None = None
        self._step_values: StepValues | None = None
        self._memory: RunMemory | None = None
        self._gathers_at_once = False
        self._states: list[GuardedStates] = []
        self._num_optimized = -1
        """how many parameters the optimizers had when they were last checked"""
        self._registrations = [
            torch_module.register_module_parameter_registration_hook(self.guard.note_registration),
            torch_module.register_module_module_registration_hook(self.guard.note_registration),
        ]
        self._is_open = True
        self._hangs: HangWatch | None = None
        self.averages = Averages(options)
        self._for_summaries: object = None
        self._released: list[nn.Parameter] = []
        """what was guarded after the run before this one"""

    def __deepcopy__(self, memo: object) -> Self:
        """A copy of a Trainer, which a callback may make, has none of its own: the run's connections exist once."""
        return self

    def watch_hangs(self, trainer: "pl.Trainer") -> None:
        """From now on until the run ends: report it if no rank moves. Called in the thread that runs the Trainer."""
        if self.topology.world_size > 1:
            own = OwnStatus(
                self.rank, self._num_actions, self._action, lambda: self._place_in_run(trainer), self._transports
            )
            self._hangs = HangWatch(self.failures, own, self._options.timeout)

    @property
    def pipeline(self) -> Pipeline:
        """This rank's part of the pipeline."""
        return available(self._pipeline, "the pipeline exists once the Trainer has set up the model")

    @property
    def norms(self) -> GradientNorms:
        """Norms over the whole model's gradients."""
        return available(self._norms, "norms of the whole model exist once the Trainer has set up the model")

    @property
    def nonfinite(self) -> NonFiniteCheck:
        """Keeps NaN and infinite gradients away from the weights."""
        return available(self._nonfinite, "gradients are looked at once the Trainer has set up the model")

    @property
    def replica_check(self) -> ReplicaCheck:
        """Compares parameters that several ranks hold."""
        return available(self._replica_check, "copies are compared once the Trainer has set up the model")

    @property
    def loss_watch(self) -> LossWatch:
        """Compares the weights of micro-batches with their losses."""
        return available(self._loss_watch, "losses are watched once the Trainer has set up the model")

    @property
    def collections(self) -> Collections:
        """What the steps collect for hooks."""
        return available(self._collections, "it is known what steps collect once the Trainer has set up the model")

    @property
    def hand_over(self) -> HandOver:
        """Gives the other pipeline ranks what the steps have left."""
        return available(self._hand_over, "values are handed over once the Trainer has set up the model")

    def begin_training(self, module: "pl.LightningModule", split: SplitBatch) -> None:
        """Say in the first training batch what may be wrong: hooks at the start of a run may have changed modes."""
        if not self._has_trained:
            self._has_trained = True
            warn_of_batch_statistics(module, split.num_microbatches)
            if self.cube is not None and self.cube.shares_samples:
                suggest_tokens(module, split.pieces, self.cube.mesh.num_ranks)

    def warn_of_parts(self, names: Iterable[str], num_microbatches: int) -> None:
        """Say, once for each, which lists and attributes hold values of micro-batches, if a hook may read them."""
        if not self.hand_over.is_read:
            return
        known = self._warned | {f"self.{name}" for name in self.pipeline.step_state.warned_of}
        new = [name for name in names if name not in known]
        self._warned.update(new)
        warn_of_parts(new, num_microbatches)

    def weigh(self, pieces: Sequence[Any], sizes: PieceSizes, *, trains: bool) -> PieceWeights:
        """The weights of a batch's pieces. In training called by all data ranks."""
        weighting = LossWeighting(self._loss_weight, self.topology.data, self._groups.data_control)
        return weighting.for_training(pieces, sizes) if trains else weighting.for_evaluation(pieces, sizes)

    def reseed(self, seed: int) -> None:
        """Let the random streams go on as those of the run that had this seed. Called by all ranks."""
        self.seed = seed
        if self.pipeline.random_streams is not None:
            self.pipeline.random_streams.reseed(seed)

    @property
    def has_pipeline(self) -> bool:
        """Whether the model is set up."""
        return self._pipeline is not None

    @property
    def is_running(self) -> bool:
        """Whether the model is set up, and the run has not ended."""
        return self._is_open and self.has_pipeline

    def set_up(self, trainer: "pl.Trainer", module: "pl.LightningModule", values: KeptValues | None = None) -> None:
        """Build the pipeline and adapt Trainer and module to it. Called by all ranks of the world.

        The module is whole, and the same on all ranks, unless an earlier run has cut or converted it. Each rank reads
        its part of the `values`.
        """
        prepared = self._prepared = self._prepare(module)
        if not was_read(module):
            check_same_folders(self._options.init_folders.values(), verify=self._options.verify_checkpoints)
        plan = plan_for(trainer, module, prepared, self._options, self.topology)  # raises alike on all ranks
        if prepared.ownership is None:  # later runs of a module leave the same stacks whole
            report_plan(module, plan, self._options, self.topology)
        if values is not None:
            values.check(module, prepared.cube)
        is_cut, cuts = prepared.ownership is not None, self.topology.replica_size > 1
        self._for_summaries = inspection.keep_whole(module, is_cut=is_cut, cuts=cuts)
        if self.topology.replica_size > 1:
            run_uncompiled(module, plan.stack, self.attributes, cube=_block_kind(plan, prepared))
        seed = self.seed = broadcast_object(torch.initial_seed())
        if prepared.cube is None:
            if self.topology.world_size > 1:
                broadcast_values(whole_values(module), self.device)
            prepared.cube = self._make_cube(plan)
        self.cube = prepared.cube
        if self.topology.replica_size > 1:
            prepared.attach(module, self.topology, self._options, self._groups)
        streams = self._random_streams(trainer, plan.layout, seed)
        example = user_hooks.example_run(module, self.device) if self._options.balance == "time" else None
        context = self._rank_context(trainer, seed, streams, () if values is None else values.names)
        self._build(module, plan, context, example)
        self.names = prepared.names = {parameter: name for name, parameter in module.named_parameters()}
        if values is not None:
            values.put_in(module, prepared.cube)
        self._loss_weight = for_model(self._options.loss_weight, module, self._options.batch_dim)
        self._loss_watch = self._watch_losses(module)
        self._open_user_code(trainer, module)
        if trainer.state.fn == TrainerFn.FITTING and module.automatic_optimization:
            self._examine_first_batch()
        self._adapt(trainer, module)
        self._norms = self._make_norms(module)
        if self.topology.replica_size > 1 or self._scatters_gradients:
            norms.start(self._norms)
        collectives.start(self._raw)
        if self.cube is not None and not self.cube.shares_samples:
            ranks, is_required = self.cube.mesh.axis("xyz"), self._options.cube_outside == "tokens"
            self.token_losses = TokenLosses(
                module, ranks, self.guard, is_required=is_required, is_allowed=not self._options.pairs
            )
            self.token_losses.start(self.attributes.set)
        self._replica_check = self._check_of_replicas(module)
        self._nonfinite = look = self._check_of_gradients(trainer, module)
        plugin, attributes = trainer.precision_plugin, self.attributes
        state.call_before_steps(plugin, attributes, look.before_step, on_unscaled=look.after_unscaling)
        self.guard.after_registering = partial(self.follow, trainer, module)

    def _build(self, module: "pl.LightningModule", plan: ModelPlan, context: RankContext, example: Any = None) -> None:
        self._pipeline = build_pipeline(module, plan, self._prepared, context, example)
        if self._options.measure_memory:
            self._memory = RunMemory(self._pipeline, self.device)

    @property
    def _prepares_parameters(self) -> bool:
        """Whether parameters are treated in a way that new ones aren't."""
        options = self._options
        return options.shard_optimizer or options.offload_optimizer or options.master_weights is not None

    def follow(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        """Build the pipeline anew if a hook has given the module other parameters. Called by all ranks of the world."""
        before = self.pipeline
        if self._prepares_parameters or not self._prepared.is_outdated(module):
            return
        with self.guard.off():
            self.replica_relay.broadcast("parameters")
            if not self._prepared.adopt(module, self.device, self._pipe_rank):
                return
            before.close()
            restore_forwards(before)
            context = self._rank_context(trainer, self.seed, before.random_streams, ())
            self._build(module, ModelPlan(before.ownership.stack, before.layout, None), context)
            self.pipeline.engine.trace = before.engine.trace
            self.collections.watch(module, modules_outside(module, before.ownership.stack))
            self.norms.watch([one for one in self.names if isinstance(one, nn.Parameter)])
            self.nonfinite.parameters = self._own_parameters()
            self._replica_check = self._check_of_replicas(module)

    def _before_user_code(self) -> None:
        self.finish_gather()
        for states in self._states:
            states.enter()

    def _after_user_code(self) -> None:
        for states in self._states:
            states.leave()

    def guard_states(self, of: Sequence[Any]) -> None:
        """Let user code find the states of these optimizers guarded from now on. Called while none runs."""
        plain: list[Any] = [one for one in map(state.unwrapped, of) if isinstance(vars(one).get("state"), dict)]
        is_cut = self.shards is not None or self.topology.replica_size > 1
        if is_cut and plain != [states.optimizer for states in self._states]:
            self._states = [GuardedStates(one, self.guard, self.names, self.state_sharding) for one in plain]

    def check_optimizers(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        """Refuse parameters of optimizers that the run doesn't know. Called by all ranks before each training batch.

        Looks through them in an epoch's first batch, and when there are more or fewer.
        """
        self.guard_states(trainer.optimizers)
        groups = [group["params"] for one in trainer.optimizers for group in one.param_groups]
        number, is_free = sum(map(len, groups)), self.topology.world_size == 1 and self._options.master_weights is None
        if is_free or (number == self._num_optimized and state.batch_idx(trainer) > 0):
            return
        self._num_optimized = number
        unknown = next((one for group in groups for one in group if one not in self.names), None)
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

    def _prepare(self, module: "pl.LightningModule") -> PreparedModel:
        """Let the module be used again; if this is a run on another layout, make it whole on all ranks first."""
        prepared = PreparedModel.of(module)
        prepared.check(module)
        self._released = guards.release(module)
        if prepared.cube is not None:
            prepared.cube.open()
        if prepared.fits(module, self.topology, self._options):
            return prepared
        prepared.restore_whole(module)
        self._released = []
        return PreparedModel()

    def prepare_steps(
        self, module: "pl.LightningModule", optimizers: Sequence[Optimizer], values: KeptValues | None
    ) -> None:
        """Let the optimizers update own rows of parameters, and fp32 copies, if the options say so.

        Called by all ranks, once the model is set up. Of the `values` the copies take what the parameters' dtype had no
        bits for.
        """
        has_masters = self._options.master_weights is not None
        offloads = self._options.offload_optimizer
        if not (has_masters or offloads or self.shards is not None):
            return
        self._step_values = StepValues(
            module.parameters(), optimizers, self.shards, has_masters=has_masters, in_host_memory=offloads
        )
        averages = bool(user_hooks.averaging_callbacks(module.trainer))
        self._gathers_at_once = averages or not module.automatic_optimization
        if values is not None and has_masters:
            with self._step_values.in_use():
                values.put_in(module, self.sharding_in_use)

    @property
    def shards(self) -> OptimizerShards | None:
        """How the optimizer is sharded over the data ranks; None if it isn't."""
        return self.pipeline.gradients.shards if self.has_pipeline else None

    @property
    def _scatters_gradients(self) -> bool:
        return self.shards is not None and self.shards.scatters

    @property
    def state_sharding(self) -> "Cube | OptimizerShards | None":
        """How the optimizers' states are sharded."""
        return self.shards or self.cube

    @property
    def sharding_in_use(self) -> "Cube | OptimizerShards | None":
        """How parameters are sharded inside `master_values`."""
        sharding = None if self._step_values is None else self._step_values.sharding
        return sharding or self.cube

    def finish_gather(self) -> None:
        """Wait until all parameters are as the optimizer's last step has left them."""
        if self.has_pipeline:
            self.pipeline.gradients.finish_gather()

    def end_optimizer_step(self) -> None:
        """Called after each step of an optimizer: what reads parameters next may not ask whether they are there."""
        if self._gathers_at_once:
            self.finish_gather()

    def master_values(self) -> AbstractContextManager[None]:
        """Inside it, parameters have the values that the optimizer updates."""
        return nullcontext() if self._step_values is None else self._step_values.in_use()

    @contextmanager
    def agreeing_on_gradients(self, hook: str) -> Iterator[None]:
        """Inside it, a hook may remove gradients: on all ranks that hold shards of them, and then on all or none."""
        parameters = self.pipeline.parameters  # no groups in local variables: a traceback would keep them alive
        had_gradients = _any_gradient(parameters)
        yield
        self.replica_relay.broadcast("vote")
        if self._groups.cube is not None:
            votes.agree_in_cube(parameters, self._groups.cube.whole)
        votes.check_alike(
            hook, had_gradients=had_gradients, has_gradients=_any_gradient(parameters), replica=self._groups.replica
        )

    def measured_batch(
        self, module: "pl.LightningModule", optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        """Inside it a training batch runs, whose memory is measured if the options say so."""
        return nullcontext() if self._memory is None else self._memory.batch(module, self._held_by(optimizers))

    def measured_step(
        self, module: "pl.LightningModule", optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        """Inside it the optimizer steps, and may run the batch before."""
        if self._memory is None:
            return nullcontext()
        return self._memory.step(module, lambda: self._held_by(optimizers), state.batch_idx(module.trainer))

    @property
    def measured_peak(self) -> int:
        """The most bytes that measured batches have held; 0 if none was measured."""
        return 0 if self._memory is None else self._memory.peak

    def memory_report(self) -> MemoryReport:
        """See `HanayoStrategy.memory_report`."""
        self.check_all_ranks("memory_report")
        if self._memory is None:
            raise not_measured()
        return self._memory.report(self._groups)

    def _held_by(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """The optimizers' states, and master weights."""
        values = (value for one in optimizers for state in one.state.values() for value in state.values())
        masters = [] if self._step_values is None else self._step_values.master_weights
        return [*masters, *(value for value in values if isinstance(value, Tensor))]

    def measure_memory(self, module: "pl.LightningModule") -> None:
        """Find how much the fullest rank holds. Called by all ranks, before a training."""
        own = inspection.held_bytes(module)
        held = all_gather_objects(self._groups.replica, own) if self.topology.replica_size > 1 else [own]
        self.held_bytes = max(held)

    def say_what_runs(self, trainer: "pl.Trainer") -> None:
        """On rank 0, at the start of a training: layout, schedule, samples and memory."""
        if self.topology.replica_size > 1 and self.rank == 0:
            layout, ownership = self.pipeline.layout, self.pipeline.ownership
            rank_zero_info(inspection.describe_run(trainer, layout, ownership, self.topology, self.held_bytes))

    def check_all_ranks(self, function: str) -> None:
        """Check that the user code that runs now, and calls the function, runs on all ranks.

        Raises:
            UnsupportedError: it runs on pipeline rank 0 alone.
        """
        if self.guard.scope in ("step", "alone"):
            raise UnsupportedError(
                f"{function} was called in {self.guard.hook_name or 'a step'}, which runs on pipeline rank 0 alone. "
                f"Call it in a hook that runs on all ranks, such as on_train_epoch_end, or after fit."
            )

    def gather_model(self, module: "pl.LightningModule") -> "pl.LightningModule | None":
        """See `HanayoStrategy.gather_model`."""
        self.check_all_ranks("gather_model")
        self.finish_gather()
        if self._data_rank > 0:  # the first pipeline sends to rank 0
            return None
        with self.guard.off():
            return PreparedModel.of(module).gather_model(module, self.attributes, is_wanted=self.rank == 0)

    def close(self) -> None:
        """End the run, once the other ranks have received what this one sent. After `abandon`: do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._number == next_number():  # no loader has drawn from it, and the next run needs other numbers
            torch.randint(1, ())
        self.failures.stop()
        self.attributes.restore()
        self._stop_whole_model()
        if self._step_values is not None:
            self._step_values.close()
        for relay in self._relays:
            relay.finish()
        if self._pipeline is not None:
            self._pipeline.close()
            restore_forwards(self._pipeline)
        if self._hangs is not None:
            self._hangs.finish()

    def finish_sends(self) -> None:
        """Wait until all is sent: a send that ends when torch's profiler has stopped would use memory that it freed."""
        for relay in self._relays:
            relay.finish()
        self.pipeline.engine.channel.finish()

    def abandon(self) -> None:
        """End the run after a failure, without waiting for other ranks.

        Drops the process groups, and nothing that a traceback keeps alive may hold one: gloo wakes the ranks that wait
        for this one only when its connections are closed.
        """
        self._is_open = False
        self.stop_watching()
        self._open_groups = None
        self.collectives.forget()
        self.failures.stop()
        self.attributes.restore()
        self._stop_whole_model()
        if self._step_values is not None:
            self._step_values.abandon()
        if self._pipeline is not None:
            self._pipeline.abandon()
            restore_forwards(self._pipeline)
        for relay in self._relays:
            relay.forget()
            relay.transport.close()

    def drop_transfers(self) -> None:
        """After `abandon`, when the process groups have been left: free what was under way."""
        if self._pipeline is not None:
            self._pipeline.gradients.drop_transfers()

    def guard_module(self) -> None:
        """The last act of a run: user code may use of the module what is whole on this rank, and no more."""
        guards.guard(self.guard.end() or self._released)
        self.averages.close()
        if self.cube is not None:
            self.cube.close()

    def stop_watching(self) -> None:
        """Report nothing more: another run begins, or this one has failed."""
        if self._hangs is not None:
            self._hangs.stop()
            self._hangs = None

    def _stop_whole_model(self) -> None:
        collectives.stop(self._raw)
        for handle in self._registrations:
            handle.remove()
        if self.token_losses is not None:
            self.token_losses.stop()
        if self._norms is not None:
            norms.stop(self._norms)
            self._norms.close()
        if self._nonfinite is not None:
            self._nonfinite.close()
        if self._replica_check is not None:
            self._replica_check.close()

    @property
    def _groups(self) -> ProcessGroups:
        return available(self._open_groups, "process groups exist until a run has failed")

    @property
    def _relays(self) -> tuple[Relay, ...]:
        return tuple({id(relay): relay for relay in (self.pipe_relay, self.replica_relay)}.values())

    def _transports(self) -> list[Transport]:
        engine = [self.pipeline.engine.channel.transport] if self.has_pipeline else []
        return [relay.transport for relay in self._relays] + engine

    def _num_actions(self) -> int:
        """Grows with all that this rank does."""
        return self.guard.num_entered + (self.pipeline.engine.num_steps if self.has_pipeline else 0)

    def _action(self) -> Action | None:
        return self.pipeline.engine.action if self.has_pipeline else None

    def _place_in_run(self, trainer: "pl.Trainer") -> str:
        return state.place_in_run(trainer) if self.has_pipeline else "set-up"

    def _relay(self, ranks: tuple[int, ...], groups: ProcessGroups) -> Relay:
        control = groups.control if ranks == groups.pipe_ranks else groups.replica
        on_failure = self.failures.on_transfer
        return Relay(
            ProcessGroupTransport(ranks, control=control, channels={}, device=self.device, on_failure=on_failure)
        )

    def _rank_context(
        self, trainer: "pl.Trainer", seed: int, streams: RandomStreams | None, given: Collection[str]
    ) -> RankContext:
        return RankContext(
            self._options,
            self._groups,
            self.device,
            self.pipe_relay,
            self.attributes,
            self.guard,
            self.failures.on_transfer,
            seed,
            streams,
            self.values,
            given,
            trains=trainer.state.fn == TrainerFn.FITTING,
            scatters_gradients=not user_hooks.may_see_gradients(trainer),
        )

    def _make_cube(self, plan: ModelPlan) -> Cube | None:
        if plan.conversion is None or self._groups.cube is None:
            return None
        rank_zero_info(f"cube={self.topology.cube}\n{plan.conversion.report}")
        return Cube(self._groups.cube, plan.conversion, self._options, self.device)

    def _random_streams(self, trainer: "pl.Trainer", layout: Layout, seed: int) -> RandomStreams | None:
        """None where nothing is cut: there torch's own generators give the numbers that a plain Trainer draws.

        Outside `fit` no step counter tells one run from the next, so each run takes a seed from the state of torch's
        generator, which reading data changes.
        """
        if self.topology.world_size == 1 and layout.num_microbatches == 1:
            return None
        if trainer.state.fn != TrainerFn.FITTING:
            self._number = next_number()
            seed = broadcast_object(seed_of(seed, self._number))
        place = self.cube.sample_rank if self.cube is not None else 0
        return RandomStreams(seed, self._data_rank, self.device, cube_rank=place)

    def _adapt(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        attributes = self.attributes
        guarded_hooks.guard_hooks(
            trainer,
            self.guard,
            attributes,
            num_pipe_ranks=self.topology.pipe,
            pipe_rank=self._pipe_rank,
            end_hook=self.progress.end_hook,
        )
        several, first = self.topology.replica_size > 1, self.replica_relay.transport.rank == 0
        guarded_hooks.guard_writers(trainer, self.guard, attributes, writes=first, is_alone=several)
        computes, warns = self._pipe_rank == 0, self.topology.data > 1
        # The ranks of a cube log the same values: rank 0's are used for all of them.
        metrics.share_metrics(
            trainer,
            self.replica_relay,
            attributes,
            computes=computes,
            warns=warns,
            at_epoch_end=self._at_epoch_end,
        )
        keep_inference_mode(trainer, attributes)
        loaders.after_new_iterators(trainer, attributes, self.generators.share)
        if self.topology.world_size > 1:
            vote_on_steps(module, attributes)
        if self.topology.replica_size > 1:
            votes.agree_after_hooks(trainer, module, attributes)
            callbacks.compare_whole_parameters(trainer, self.guard, attributes, self.cube)
        metrics.sync_metrics_over(module, self._groups.metrics, attributes)
        if self._pipe_rank > 0:
            loaders.skip_hooks_without_data(module, attributes)
        if self.topology.data > 1:
            before_validations(trainer, attributes, lambda: self.pipeline.step_state.update_over_data())
        if self.pipeline.layout.num_stages > 1:
            inspection.follow_steps(trainer, self.pipeline.ownership.stack, attributes)
        inspection.count_batches_once(trainer, self.topology)

    def _examine_first_batch(self) -> None:
        """Let the first batch show that its micro-batches, and those of other data ranks, add up to it."""
        pipeline, count = self.pipeline, self.pipeline.layout.num_microbatches
        ownership = pipeline.ownership
        if count * self.topology.data == 1 and self.cube is None:
            return
        own = [index for stage in ownership.stages_of(pipeline.rank) for index in ownership.stages[stage]]
        pipeline.begin_training(
            FirstBatch(
                blocks={index: ownership.stack.blocks[index] for index in own},
                values=self.values,
                device=self.device,
                num_microbatches=count,
                num_data=self.topology.data,
                is_single=pipeline.layout.num_stages == 1,
                is_cube=self.cube is not None,
                keeps_samples=self.cube is None or self.cube.keeps_layout,
                carriers=next(iter(pipeline.engine.stages.values())).carriers,
                share=partial(self.failures.gather, "what the first batch shows"),
                warns=self.rank == 0,
            )
        )

    def _watch_losses(self, module: "pl.LightningModule") -> LossWatch:
        return LossWatch(
            module,
            self._options.loss_weight,
            batch_dim=self._options.batch_dim,
            warns=self.cube is None or self.cube.sample_rank == 0,
            shares_samples=self.cube is not None and self._options.cube_outside == "share",
        )

    def _open_user_code(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        self._collections = Collections(module, modules_outside(module, self.pipeline.ownership.stack))
        self._hand_over = HandOver(
            self.pipe_relay,
            self.device,
            self._collections,
            self.generators,
            before_batches=guarded_hooks.run_before_batches(trainer),
            after_batches=guarded_hooks.read_after_batches(trainer),
            after_epochs=guarded_hooks.read_after_epochs(trainer),
        )

    def _at_epoch_end(self) -> None:
        self.progress.end_epoch()
        self.hand_over.at_epoch_end()

    def _check_of_gradients(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> NonFiniteCheck:
        return NonFiniteCheck(
            self._options.nonfinite,
            RankNames(self.rank, self.topology.place, self._block_names),
            self.values,
            self._own_parameters(),
            self.norms,
            self._groups,
            num_steps=lambda: trainer.global_step,
            is_search=partial(state.searches_rate, trainer),
        )

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank trains, by name."""
        return {self.names[parameter]: parameter for parameter in self.pipeline.parameters if parameter in self.names}

    @property
    def _block_names(self) -> BlockNames:
        ownership = self.pipeline.ownership
        return BlockNames(ownership.stack.block_names, ownership.stages)

    def _check_of_replicas(self, module: "pl.LightningModule") -> ReplicaCheck:
        cube, groups = self.cube, self._groups
        among = (groups.data_control, None if groups.cube is None else groups.cube.whole)
        return ReplicaCheck(
            self._options.check_replicas,
            {
                (name, "" if cube is None else str(cube.region(parameter))): parameter
                for name, parameter in module.named_parameters()
                if not parameter.is_meta
            },
            [group for group in among if group is not None],
            self._block_names.stage_of,
            self.topology.place,
        )

    def _make_norms(self, module: "pl.LightningModule") -> GradientNorms:
        num_replicas = None if self.cube is None else self.cube.num_replicas
        several = self.topology.replica_size > 1
        groups = (self._groups.replica, self._groups.replica_tensors) if several else None
        own_part = None
        if self.shards is not None and self.shards.scatters:
            own_part = self.shards.own_rows
            world = self._groups.factory.control(self.topology.groups("data", "pipe", "x", "y", "z"))
            groups, num_replicas = (world, available(dist.group.WORLD, "several ranks")), self.shards.num_replicas
        return GradientNorms(
            list(module.parameters()),
            groups,
            num_replicas=num_replicas,
            own_part=own_part,
            relay=self.replica_relay,
            device=self.device,
            unguarded=self.guard.off,
        )


def _any_gradient(parameters: Iterable[Tensor]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


def _block_kind(plan: ModelPlan, prepared: PreparedModel) -> Literal["registered", "generic"] | None:
    """How the cube holds the blocks; None without a cube."""
    conversion = plan.conversion if prepared.cube is None else prepared.cube.plan
    if conversion is None:
        return None
    return "registered" if conversion.is_registered else "generic"
