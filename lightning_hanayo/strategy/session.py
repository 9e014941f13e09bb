"""One run of the Trainer on one rank, for its hooks: the pipeline, and all that is set up with it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer

from lightning_hanayo.partition import guards
from lightning_hanayo.partition.stack import is_ambiguous, modules_outside
from lightning_hanayo.pipeline_parallel.batches.merge import PieceSizes
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchSource
from lightning_hanayo.pipeline_parallel.object_collectives import all_gather_objects, broadcast_object
from lightning_hanayo.pipeline_parallel.rng import NO_STREAMS, RandomStreams, next_number
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.seeds import seed_of
from lightning_hanayo.strategy import callbacks, guarded_hooks
from lightning_hanayo.strategy.batch_split import SplitBatch
from lightning_hanayo.strategy.callbacks import Averages
from lightning_hanayo.strategy.checkpoints.load import KeptValues
from lightning_hanayo.strategy.checkpoints.save import Checkpoints
from lightning_hanayo.strategy.groups import broadcast_values
from lightning_hanayo.strategy.hangs import HangWatch, OwnStatus
from lightning_hanayo.strategy.lightning import loaders, loops, metrics, state, user_hooks
from lightning_hanayo.strategy.lightning.signals import StopsOnSignal
from lightning_hanayo.strategy.losses import LossWeight, LossWeighting, PieceWeights, TokenLosses, for_model
from lightning_hanayo.strategy.nonfinite import BlockNames, NonFiniteCheck
from lightning_hanayo.strategy.norms import GradientNorms
from lightning_hanayo.strategy.optimizer_steps import OptimizerSteps
from lightning_hanayo.strategy.probing.probe import Sample
from lightning_hanayo.strategy.probing.step_choice import StepChoice
from lightning_hanayo.strategy.restarts import Restarts
from lightning_hanayo.strategy.run import Run, RunParts
from lightning_hanayo.strategy.setup.build_pipeline import build_pipeline, examine_first_batch, whole_values
from lightning_hanayo.strategy.setup.checks import run_uncompiled, warn_of_batch_statistics
from lightning_hanayo.strategy.setup.plan import ModelPlan, plan_for, report_plan
from lightning_hanayo.strategy.setup.prepared_model import Cube, PreparedModel
from lightning_hanayo.strategy.setup.values import check_same_folders, was_read
from lightning_hanayo.strategy.uncut_step import called_stacks
from lightning_hanayo.strategy.user_code import collectives
from lightning_hanayo.strategy.user_code.collected import Collections, warn_of_parts
from lightning_hanayo.strategy.user_code.collectives import UserCollectives
from lightning_hanayo.strategy.user_code.hand_over import HandOver
from lightning_hanayo.strategy.votes import ReplicaCheck, SavesOnException, StepVotes, agree_after_hooks
from lightning_hanayo.tensor_parallel.on_use import whole_arguments


class Session(Run):
    """Lives for one fit, validate, test or predict: made when the processes are connected, closed at teardown.

    Args: as for `Run`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        options = self.options
        self._first_parts = RunParts()
        """end before the others, while it still counts as a failure if another rank ends"""
        self.votes = StepVotes(self)
        self.restarts: Restarts | None = None
        """None if nobody starts this run again"""
        self.given_batch_sizes = metrics.GivenBatchSizes()
        self.averages = Averages(self)
        self.token_losses: TokenLosses | None = None
        """of a cube, in steps that all of its ranks run alike"""
        self.names: dict[Tensor, str] = {}
        """of the module's parameters, and of those that it had and optimizers may still have"""
        self.guard.after_step = self._after_step
        self.collectives = UserCollectives(self)
        for hook in (
            torch_module.register_module_parameter_registration_hook,
            torch_module.register_module_module_registration_hook,
        ):
            self.parts.add(hook(self.guard.note_registration).remove)
        self._prepared = PreparedModel()
        self._has_trained = False
        self._number: int | None = None
        """the next number of torch's generator when the run began, if its random streams depend on that"""
        self._warned: set[str] = set()
        self._released: list[nn.Parameter] = []
        """the parameters that were guarded after the run before this one"""
        self._for_summaries: object = None
        self._is_open = True
        self._hangs: HangWatch | None = None
        """of several ranks: reports from now on until the run ends if none of them moves"""
        if self.topology.world_size > 1:
            self._hangs = HangWatch(self.failures, OwnStatus(self), options.transfer_time)
            self.parts.add(self._hangs.finish, self._hangs.stop)

    def __deepcopy__(self, memo: object) -> Self:
        """A copy of a Trainer, which a callback may make, has none of its own: the run's connections exist once."""
        return self

    def begin(self, io: CheckpointIO) -> None:
        """Adapt loops and callbacks before the model is set up. Called by all ranks of the world.

        `io`: the user's way to write files.
        """
        trainer, attributes = self.trainer, self.attributes
        if self.topology.world_size > 1:
            loops.agree_on_counts(trainer, attributes)
            loops.end_searches_on_failure(trainer, attributes, self.rank)
            loops.validate_together(trainer, attributes)
        self.checkpoints = Checkpoints(self, io)
        """saves and removes those of this run"""
        self.saves_on_exception = SavesOnException(self, self.checkpoints)
        """lets callbacks save if all ranks have stopped at the same step"""
        if self.topology.replica_size > 1:
            self.averages.adapt_callbacks()
        self.stops = StopsOnSignal(self, self.checkpoints.finish)
        """stops all ranks after the same batch"""
        self._first_parts.add(self.stops.close)
        self._first_parts.add(self.checkpoints.finish, self.checkpoints.abandon)
        self.restarts = Restarts.begin(self)

    def begin_training(self, split: SplitBatch, *, is_whole: bool) -> None:
        """Warn in the first training batch: hooks at the start of a run may have changed modes."""
        if not self._has_trained:
            self._has_trained = True
            once = modules_outside(self.module, self.pipeline.ownership.stack) if is_whole else ()
            warn_of_batch_statistics(self.module, split.num_microbatches, except_of=once)

    def warn_of_parts(self, names: Iterable[str], num_microbatches: int) -> None:
        """Say, once for each, which lists and attributes hold values of micro-batches, if a hook may read them."""
        if not self.hand_over.after_epochs:
            return
        known = self._warned | {f"self.{name}" for name in self.pipeline.step_state.warned_of}
        new = [name for name in names if name not in known]
        self._warned.update(new)
        warn_of_parts(new, num_microbatches)

    def split(
        self, batch: Any, source: BatchSource, step: Callable[[Any], Any], *, trains: bool, is_first: bool
    ) -> tuple[SplitBatch, bool]:
        """The batch in micro-batches, and whether only the stack gets them, as the step runs once on the whole batch.

        Called on pipeline rank 0, in training of all data ranks.
        """
        must = False not in self.pipeline.ends
        split = self.pipeline.split(batch, source, is_whole=must)
        if self.choice is None:
            return split, must
        if trains:
            once = self.choice.trains_once(Sample(batch, split, source, step), is_first=is_first)
        else:
            may = not self.trainer.predicting and len(split.present) > 1
            once = may and self.choice.evaluates_once(Sample(batch, split, source, step))
        if once and self.pipeline.runs_whole_steps:
            return self.pipeline.splitter.split(batch, 1, source), False
        return (self.pipeline.split(batch, source, is_whole=True) if once else split), once

    def weigh(self, pieces: Sequence[Any], sizes: PieceSizes, stage: str, *, is_whole: bool = False) -> PieceWeights:
        """The weights of a batch's pieces, of an evaluation's `stage` or in training (""): called by all data ranks."""
        choice, trains = self.choice, not stage
        if choice is not None and not choice.named and (trains or choice.knows(stage) and not is_whole):
            if is_whole:
                return PieceWeights((1.0,), (1.0,), (1 / self.topology.data,))
            return choice.weigh(pieces, sizes, stage)
        weighting = LossWeighting(self._loss_weight, self.topology.data, self.groups.data_control)
        return weighting.for_training(pieces, sizes) if trains else weighting.for_evaluation(pieces, sizes)

    @property
    def is_running(self) -> bool:
        """Whether the model is set up, and the run has not ended."""
        return self._is_open and self.has_pipeline

    def set_up(self, values: KeptValues | None = None) -> None:
        """Build the pipeline and adapt Trainer and module to it. Called by all ranks of the world.

        The module is whole, and the same on all ranks, unless an earlier run has cut or converted it. Each rank reads
        its part of the `values`.
        """
        trainer, module = self.trainer, self.module
        prepared = self._prepared = self._prepare()
        options, several = self.options, self.topology.replica_size > 1
        if not was_read(module):
            check_same_folders(options.init_folders.values(), verify=options.verify_checkpoints)
        called = self._called_stacks() if several else ()
        named = replace(options, blocks=called[0]) if called else options
        plan = plan_for(trainer, module, prepared, named, self.topology)  # raises alike on all ranks
        if prepared.ownership is None:  # later runs of a module leave the same stacks whole
            report_plan(module, plan, options, self.topology, called)
        if values is not None:
            values.check(module, prepared.cube)
        self._for_summaries = state.keep_whole(module, is_cut=prepared.ownership is not None, cuts=several)
        if several:
            conversion = plan.conversion if prepared.cube is None else prepared.cube.plan
            is_registered = None if conversion is None else conversion.is_registered
            run_uncompiled(module, plan.stack, self.attributes, is_registered=is_registered)
        self.seed = broadcast_object(torch.initial_seed())
        if prepared.cube is None:
            if self.topology.world_size > 1:
                broadcast_values(whole_values(module), self.device)
            if plan.conversion is not None and self.groups.cube is not None:
                rank_zero_info(f"cube={self.topology.cube}\n{plan.conversion.report}")
                prepared.cube = Cube(self.groups.cube, plan.conversion, options, self.device)
        self.cube = cube = prepared.cube
        if several:
            prepared.attach(module, self.topology, options, self.groups)
        fits = trainer.state.fn == TrainerFn.FITTING
        streams = self._random_streams(plan.layout, fits=fits)
        self.pipeline = build_pipeline(self, plan, prepared, streams, () if values is None else values.names)
        self.parts.add(lambda: self.pipeline.close(), lambda: self.pipeline.abandon())  # `follow` makes another one
        self.names = prepared.names = {parameter: name for name, parameter in module.named_parameters()}
        if values is not None:
            values.put_in(module, cube)
        shards = self.pipeline.gradients.shards
        self.steps = OptimizerSteps(self, shards, self.names)
        rule: LossWeight = "samples" if options.loss_weight == "auto" else options.loss_weight
        self._loss_weight = for_model(rule, module, options.batch_dim)
        """by which losses are weighed where no probe decides"""
        self.choice = StepChoice.of_run(self, self.pipeline, cube, self._loss_weight)
        """how often steps run; None: as an option says"""
        self.collections = Collections(module, modules_outside(module, self.pipeline.ownership.stack))
        """lists and attributes in which the steps collect values for hooks"""
        times = (guarded_hooks.BEFORE_BATCHES, guarded_hooks.AFTER_BATCHES, guarded_hooks.AFTER_EPOCHS)
        defined = (user_hooks.user_defines(trainer, *hooks) for hooks in times)
        self.hand_over = HandOver(self, self.collections, *defined)
        if fits and module.automatic_optimization:
            examine_first_batch(self, self.pipeline, cube)
        self._adapt()
        if several:
            callbacks.compare_whole_parameters(self, cube)
        self.norms = GradientNorms.of_run(self, cube, shards)
        """over the whole model's gradients"""
        collectives.PATCHES.start(self.collectives)
        self.parts.add(lambda: collectives.PATCHES.stop(self.collectives))
        if cube is not None:
            ranks, is_required = cube.mesh.axis("xyz"), options.cube_outside == "tokens"
            arguments = whole_arguments if cube.outside.kept_sharded else nullcontext
            self.token_losses = TokenLosses(
                module, ranks, is_required=is_required, is_allowed=not options.pairs, arguments=arguments
            )
            self.token_losses.start(self.attributes.set)
            self.parts.add(self.token_losses.stop)
        names = BlockNames(plan.stack.block_names, self.pipeline.ownership.stages)
        self.replica_check = ReplicaCheck(self, names.stage_of)
        self.nonfinite = NonFiniteCheck(self, self._own_parameters(), names, self.norms)
        self.guard.after_registering = self.follow

    def _adapt(self) -> None:
        """Let hooks, metrics, loaders and loops know of the other ranks, once the model is set up."""
        trainer, module, topology, attributes = self.trainer, self.module, self.topology, self.attributes
        guarded_hooks.guard_hooks(self, self.failures.end_hook)
        guarded_hooks.guard_writers(self)
        metrics.share_metrics(self, self.hand_over.at_epoch_end)
        loops.keep_inference_mode(trainer, attributes)
        loaders.after_new_iterators(trainer, attributes, self.generators.share)
        if topology.world_size > 1 and user_hooks.defines(module, "optimizer_step"):
            attributes.wrap(module, "optimizer_step", self.votes.run_override)
        if topology.replica_size > 1:
            agree_after_hooks(self)
        metrics.sync_metrics_over(module, self.groups.metrics, attributes)
        if self.pipe_rank > 0:
            loaders.skip_hooks_without_data(module, attributes)
        if topology.data > 1:  # the pipeline may be built anew
            validation = trainer.fit_loop.epoch_loop.val_loop
            attributes.before(validation, "run", lambda: self.pipeline.step_state.update_over_data())
        if not self.pipeline.is_single:
            state.follow_steps(trainer, self.pipeline.ownership.stack, attributes)
        state.count_batches_once(trainer, topology)

    def _after_step(self) -> None:
        self.failures.end_step()
        if self.cube is not None:
            self.cube.outside.check_steps()

    def follow(self) -> None:
        """Build the pipeline anew if a hook has given the module other parameters. Called by all ranks of the world."""
        options, before, module = self.options, self.pipeline, self.module
        is_special = options.shard_optimizer or options.offload_optimizer or options.master_weights is not None
        if is_special or not self._prepared.is_outdated(module):  # new parameters couldn't be treated as the others are
            return
        with self.guard.off():
            self.replica_relay.broadcast("parameters")
            if not self._prepared.adopt(module, self.device, self.pipe_rank):
                return
            before.close()
            plan = ModelPlan(before.ownership.stack, before.layout, None)
            self.pipeline = build_pipeline(self, plan, self._prepared, before.random_streams)
            self.pipeline.engine.trace = before.engine.trace
            anew = StepChoice.of_run(self, self.pipeline, self.cube, self._loss_weight)
            if self.choice is not None and anew is not None:
                self.choice.probe = anew.probe
            self.collections.watch(module, modules_outside(module, before.ownership.stack))
            self.norms.watch([one for one in self.names if isinstance(one, nn.Parameter)])
            self.nonfinite.parameters = self._own_parameters()

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank trains, by name."""
        return {self.names[one]: one for one in self.pipeline.parameters if one in self.names}

    def _prepare(self) -> PreparedModel:
        """Let the module be used again; if this is a run on another layout, make it whole on all ranks first."""
        module = self.module
        prepared = PreparedModel.of(module)
        prepared.check(module)
        prepared.between_runs.restore()
        if prepared.made_for is not None:
            prepared.check_loads()
        self._released = guards.release(module)
        if prepared.cube is not None:
            prepared.cube.open()
        if prepared.fits(module, self.topology, self.options):
            return prepared
        prepared.restore_whole(module)
        self._released = []
        return PreparedModel()

    def _called_stacks(self) -> Sequence[str]:
        """The names of the stack to cut, and of all that a step calls; empty where they needn't or can't be known.

        Called by all ranks of the world.
        """
        trainer, module = self.trainer, self.module
        if self.options.stack is not None or not is_ambiguous(module):
            return ()
        if self._prepared.ownership is not None:
            return (self._prepared.ownership.stack.name,)
        names: Sequence[str] = ()
        if self.rank == 0:
            names = called_stacks(module, lambda: loaders.first_batch(trainer, module), state.step_name(trainer))
        names = broadcast_object(names)
        return names

    def prepare_steps(self, optimizers: Sequence[Optimizer], values: KeptValues | None) -> None:
        """Prepare the values that the optimizers update. Called by all ranks, once the model is set up.

        Master weights take from the `values` the bits that the parameters' dtype has no room for.
        """
        self.steps.prepare(optimizers)
        if values is not None and self.options.master_weights is not None:
            with self.steps.master_values():
                values.put_in(self.module, self.steps.sharding_in_use)

    def finish_gather(self) -> None:
        """Wait for the all-gather that follows an optimizer step."""
        if self.has_pipeline:
            self.pipeline.gradients.finish_gather()

    def find_held_bytes(self, module: "pl.LightningModule") -> None:
        """Find how much the fullest rank holds. Called by all ranks, before a training."""
        own = state.held_bytes(module)
        held = all_gather_objects(self.groups.replica, own) if self.topology.replica_size > 1 else [own]
        self.held_bytes = max(held)
        """by the rank that holds the most, before a training"""

    def say_what_runs(self) -> None:
        """On rank 0, at the start of a training: layout, schedule, samples and memory."""
        if self.topology.replica_size > 1 and self.rank == 0:
            layout, ownership = self.pipeline.layout, self.pipeline.ownership
            rank_zero_info(state.describe_run(self.trainer, layout, ownership, self.topology, self.held_bytes))

    def gather_model(self) -> "pl.LightningModule | None":
        """See `HanayoStrategy.gather_model`."""
        self.guard.check_all_ranks("gather_model")
        self.finish_gather()
        prepared = PreparedModel.of(self.module)
        with self.guard.off():
            prepared.check_loads()
            if self.data_rank > 0:  # the first pipeline sends to rank 0
                return None
            return prepared.gather_model(self.module, self.attributes, is_wanted=self.rank == 0)

    def close(self) -> None:
        """End the run, once the other ranks have received this one's messages. After `abandon`: do nothing."""
        if not self._is_open:
            return
        self._first_parts.end()
        self._is_open = False
        if self._number == next_number():  # no loader has drawn from it, and the next run needs other numbers
            torch.randint(1, ())
        self.failures.stop()  # from now on it is no failure if another rank ends
        self.attributes.restore()
        self.parts.end()

    def finish_sends(self) -> None:
        """Wait until all is sent: a send that ends when torch's profiler has stopped would use memory that it freed."""
        for relay in self.relays:
            relay.finish()
        self.pipeline.engine.channel.finish()

    def abandon(self) -> None:
        """End the run after a failure, without waiting for other ranks.

        Drops the process groups, and nothing that a traceback keeps alive may hold one: gloo wakes the ranks that wait
        for this one only when its connections are closed.
        """
        self._first_parts.abandon()
        self._is_open = False
        self._open_groups = None
        self.failures.stop()
        self.attributes.restore()
        self.parts.abandon()

    def drop_transfers(self) -> None:
        """After `abandon`, when the process groups have been left: free the transfers that were under way."""
        if self.has_pipeline:
            self.pipeline.gradients.drop_transfers()
        if self.cube is not None:
            self.cube.drop_transfers()

    def guard_module(self) -> None:
        """The last act of a run: user code may use the whole tensors of the module on this rank, and no others."""
        is_cut = self._prepared.ownership is not None and self.topology.replica_size > 1
        cut, released = self.module if is_cut else None, self.guard.end() or self._released
        if cut is not None and self.options.restore_module and self._prepared.groups is not None:  # it hasn't failed
            self._prepared.restore_whole(cut)
        else:
            if cut is not None:
                self._prepared.take_parts(cut)
            guards.guard(released)
        self.averages.close()
        if self.cube is not None:
            self.cube.close()

    def stop_watching(self) -> None:
        """Report nothing more: another run begins, or this one has failed."""
        if self._hangs is not None:
            self._hangs.stop()

    def _random_streams(self, layout: Layout, *, fits: bool) -> RandomStreams:
        """`NO_STREAMS` where nothing is cut: there torch's own generators give the numbers that a plain Trainer draws.

        Outside `fit` no step counter tells one run from the next, so each run takes a seed from the state of torch's
        generator, which reading data changes.
        """
        if self.topology.world_size == 1 and layout.num_microbatches == 1:
            return NO_STREAMS
        seed = self.seed
        if not fits:
            self._number = next_number()
            seed = broadcast_object(seed_of(seed, self._number))
        place = self.mesh.index("xyz") if self.cube is not None and self.cube.shares_samples else 0
        return RandomStreams(seed, self.data_rank, self.device, cube_rank=place)
