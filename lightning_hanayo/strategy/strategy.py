"""The strategy: Lightning's hooks, each a signpost to where its work is done."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Literal
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _init_dist_connection,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hanayo.checkpoint.state import load_module, load_optimizer, module_state, optimizer_state
from lightning_hanayo.partition.deferred_init import is_unbuilt
from lightning_hanayo.partition.ownership import Placeholder
from lightning_hanayo.partition.stack import Stack
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.planner.profile import costs_from
from lightning_hanayo.runtime.autograd.deferred_gradients import DeferredGradients
from lightning_hanayo.runtime.comm.process_group import ProcessGroupTransport
from lightning_hanayo.runtime.comm.relay import Relay
from lightning_hanayo.runtime.random_streams import RandomStreams
from lightning_hanayo.runtime.stages.base import loss_of
from lightning_hanayo.seeds import seed_of
from lightning_hanayo.strategy.build import checks
from lightning_hanayo.strategy.build.assemble import Prepared, assemble, layout_of, plan_cube, tensors_of
from lightning_hanayo.strategy.build.connect import abandon, disconnect
from lightning_hanayo.strategy.build.cube import Cube
from lightning_hanayo.strategy.build.process_groups import ProcessGroups, agree, backend_for
from lightning_hanayo.strategy.failure import Failures
from lightning_hanayo.strategy.gradient_clipping import clip_by_norm, clip_by_norm_of_parts
from lightning_hanayo.strategy.lightning import internals, loaders
from lightning_hanayo.strategy.lightning.base import MeshStrategy
from lightning_hanayo.strategy.lightning.launcher import CheckingLauncher
from lightning_hanayo.strategy.lightning.metrics import connector_of, reads_step_metrics, share_metrics
from lightning_hanayo.strategy.lightning.microbatch_log import MicrobatchLog
from lightning_hanayo.strategy.lightning.precision import adapt, check_precision
from lightning_hanayo.strategy.loss_weight import Shares, counts_labels, shares
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


class HanayoStrategy(MeshStrategy):
    """Trains a LightningModule as a wave pipeline (Hanayo, SC'23), beside data parallelism.

    The module stays as it is. Its stack of blocks is cut into stages that lie in a zig-zag over the pipeline ranks; its
    `training_step` runs on pipeline rank 0, once for each micro-batch.

    A model too large for one process is built on the meta device, in `configure_model` (`with torch.device("meta")`, or
    `self.trainer.init_module(empty_init=True)`): each rank makes what it holds, module by module, with values that are
    the same on every layout. They come from the modules' `reset_parameters`, those of the modules around them up to the
    LightningModule, and Hugging Face's `_init_weights`; what an `__init__` does besides is refused by name.

    Example:
        >>> trainer = L.Trainer(accelerator="cpu", devices=4, strategy="hanayo")
        >>> trainer = L.Trainer(devices=8, strategy=HanayoStrategy(pipeline_parallel_size=4, data_parallel_size=2))

    Args:
        pipeline_parallel_size: P, the ranks a model is spread over; "auto": what data and cube leave over.
        num_waves: W; each pipeline rank holds 2W stages. More waves, smaller bubbles, more messages; "auto": the best
            simulated; on one rank none: the step runs straight through, as in a plain Trainer.
        cube: 3-D tensor parallelism inside each stage: 1, p for a p x p x p cube, or (x, y, z).
        data_parallel_size: D, pipelines side by side on other data; "auto": what pipeline and cube leave over.
        num_microbatches: B, the pieces a batch is cut into; a batch with fewer samples is cut into fewer. "auto": 2P.
        blocks: qualified name of the block stack, as "model.layers"; None: the outermost list of like blocks that holds
            the most parameters.
        loss_weight: a micro-batch's share in the mean loss: "samples", "tokens" (labels that aren't -100), or a
            function of the micro-batch that returns a number; "sum" for a loss that is a sum over samples.
        activation_budget: the most activations a rank may hold, in those of one micro-batch (M_a); None: P.
        cube_outside: what a cube's ranks see of a micro-batch outside the stack: "share" or "replicate".
        schedule: the name of a schedule, the path of a CSV action table, or "auto": the wave that simulates best.
        balance: what blocks cost when the stack is cut: "parameters", "time" (measured on `example_input_array`), or
            one number per block.
        costs: what stages and messages take, for choosing waves and order: the path of the `profile.json` that an
            earlier run wrote; a `CostModel` in any unit, or its fields as a mapping; None: guessed (T_B = 2 T_F,
            T_C = 0.05 T_F).
        cube_memory: what 3-D layers save for the backward: "gathered" operands, or "shards" that are gathered again.
        cube_pieces: in how many pieces a 3-D product is played, so that what travels and what is computed overlap:
            worth it where both take long.
        cube_tokens: tokens per micro-batch, for choosing how linear layers in blocks of an unknown kind are spread;
            None: 2048.
        start_method: how processes are started where nobody else does: "popen" runs the script again for each.
        timeout: how long a transfer may take before it counts as failed.

    Raises:
        HanayoError: a bad value, or sizes that don't multiply to the number of processes; before any of them starts.
    """

    strategy_name = "hanayo"

    def __init__(
        self,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        num_waves: int | Literal["auto"] = "auto",
        cube: int | tuple[int, int, int] = 1,
        data_parallel_size: int | Literal["auto"] = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        blocks: str | None = None,
        loss_weight: Literal["samples", "tokens", "sum"] | Callable[[Any], float] = "samples",
        activation_budget: float | None = None,
        cube_outside: Literal["share", "replicate"] = "share",
        schedule: str = "auto",
        *,
        balance: Literal["parameters", "time"] | Sequence[float] = "parameters",
        cube_memory: Literal["gathered", "shards"] = "gathered",
        cube_pieces: int = 1,
        cube_tokens: int | None = None,
        costs: Any = None,  # were CostModel named, jsonargparse would take a profile's path for its fields
        start_method: Literal["popen"] = "popen",
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        options = Options(
            pipeline_parallel_size=pipeline_parallel_size,
            num_waves=num_waves,
            cube=cube,
            data_parallel_size=data_parallel_size,
            num_microbatches=num_microbatches,
            blocks=blocks,
            loss_weight=loss_weight,
            activation_budget=activation_budget,
            cube_outside=cube_outside,
            schedule=schedule,
            balance=balance,
            costs=costs_from(costs),
            cube_memory=cube_memory,
            cube_pieces=cube_pieces,
            cube_tokens=cube_tokens,
            start_method=start_method,
            timeout=timeout,
        )
        super().__init__(options)
        self._failures: Failures | None = None
        self._pipeline: Pipeline | None = None
        self._accumulating = False
        self._restores_late = False
        self._changes = TemporaryAttributes()
        self._prepared: WeakKeyDictionary[pl.LightningModule, Prepared] = WeakKeyDictionary()
        self._chains: dict[Literal["pipe", "replica"], Relay] = {}

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process and its run (threads, groups, connections): a run makes it anew."""
        live: dict[str, Any] = dict.fromkeys(("_groups", "_failures", "_pipeline", "_prepared"))
        runs = self._own.runs if self.lightning_module is not None else None
        return super().__getstate__() | live | {"_changes": TemporaryAttributes(), "_chains": {}, "_runs": runs}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        runs = state.pop("_runs")
        super().__setstate__(state | {"_prepared": WeakKeyDictionary()})
        if self.lightning_module is not None:
            self._own.runs = runs

    @property
    def pipeline(self) -> Pipeline:
        """This rank's part of the pipeline; there while the Trainer runs."""
        assert self._pipeline is not None, "the pipeline is there while the Trainer runs"
        return self._pipeline

    @property
    def _own(self) -> Prepared:
        """What is kept of the current module."""
        assert self.lightning_module is not None
        return self._prepared.setdefault(self.lightning_module, Prepared())

    @property
    def _cube(self) -> Cube | None:
        """This rank's part in the cube that holds the current module, once that is set up."""
        return self._own.cube if self.lightning_module is not None else None

    # start

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = CheckingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher.check = self._check_before_launch

    def _check_before_launch(self, trainer: "pl.Trainer | None") -> None:
        module = self.lightning_module
        assert module is not None and trainer is not None
        self._check(trainer, module)
        if not internals.defines_model_late(module):
            stack, _ = self._layout(trainer, module)
            if self._cube is None:
                plan_cube(module, stack, self.options, self.topology)

    def _layout(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> tuple[Stack, Layout]:
        steady = not internals.clips_by_norm(trainer, module)
        return layout_of(module, self.options, self.topology, steady=steady)

    def _check(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        checks.check_module(module, self)
        checks.check_example(module, self.options)
        checks.check_gradients(module, self.topology)
        checks.check_callbacks(trainer, self.topology)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        backend = backend_for(self.root_device)
        device: dict[str, Any] = {} if self.root_device.type == "cpu" else {"device_id": self.root_device}
        met = _distributed_is_initialized()
        _init_dist_connection(self.cluster_environment, backend, timeout=self.options.timeout, **device)
        self._failures = Failures(self.global_rank)
        self._pipeline = None  # of the run before, or of another module
        self._chains.clear()
        if self._groups is None or not met:
            self._groups = ProcessGroups.create(
                self.topology,
                self.global_rank,
                self.root_device,
                self.options.timeout,
                shares=self.options.cube_outside == "share",
            )

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        module = self.lightning_module
        assert self.accelerator is not None and module is not None
        self.accelerator.setup(trainer)
        self._restores_late = self.restore_checkpoint_after_setup
        self.model = self.precision_plugin.convert_module(module)
        self._check(trainer, module)  # again, for a model that was built by now
        self._setup_pipeline(trainer, module)
        self._setup_trainer(trainer, module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            checks.check_optimizers(self.optimizers, self.topology)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            internals.optimizers_to_device(self.optimizers, self.root_device)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Where the model was built on the meta device: it can't take values before. Asked before and after setup."""
        return self._restores_late or (self.lightning_module is not None and is_unbuilt(self.lightning_module))

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Without values is on the meta device: `setup` makes them, on the ranks that need them."""
        with super().tensor_init_context(empty_init=False), torch.device("meta") if empty_init else nullcontext():
            yield

    def _setup_pipeline(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        assert self._failures is not None
        stack, layout = self._layout(trainer, module)  # the same error on all ranks, before the first message
        seed = self.broadcast(torch.initial_seed())
        if self._cube is None:
            checks.check_layers(module)
            if self.world_size > 1 and not any(isinstance(parameter, Placeholder) for parameter in module.parameters()):
                agree(tensors_of(module))
            self._own.cube = self._make_cube(module, stack)
        self._pipeline = assemble(
            module,
            stack,
            layout,
            self.options,
            self.groups,
            device=self.root_device,
            example=internals.example_of(module),
            runs=self._own.runs,
            cube=self._cube,
            seed=seed,
            streams=self._random_streams(trainer, layout, seed),
            changes=self._changes,
            chain=self._chain("pipe"),
            on_failure=self._failures.on_transfer,
        )
        self._own.runs = [run for run in self._pipeline.ownership.stages if run]  # a second fit finds placeholders

    def _random_streams(self, trainer: "pl.Trainer", layout: Layout, seed: int) -> RandomStreams | None:
        """None where nothing is cut: there torch's own generators give the numbers that a plain Trainer draws.

        Outside `fit` no step counter tells one run from the next, so each run takes a new seed from torch's generator.
        """
        if self.world_size == 1 and layout.num_microbatches == 1:
            return None
        if trainer.state.fn != TrainerFn.FITTING:
            seed = self.broadcast(seed_of(seed, int(torch.randint(1 << 62, ()))))
        place = self._cube.place_outside if self._cube is not None else 0
        return RandomStreams(seed, self.data_rank, self.root_device, place=place)

    def _make_cube(self, module: "pl.LightningModule", stack: Stack) -> Cube | None:
        plan, team = plan_cube(module, stack, self.options, self.topology), self.groups.cube
        if plan is None or team is None:
            return None
        if self.is_global_zero:
            rank_zero_info(f"cube={self.topology.cube}\n{plan.report}")
        return Cube(team, plan, self.options)

    def _setup_trainer(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        changes = self._changes
        adapt(self.precision_plugin, self._clip, changes)
        internals.keep_sigterm_local(trainer, changes)
        # Ranks of a cube log alike: rank 0's values count for all of them.
        chain = self._chain("pipe" if self._cube is None else "replica")
        share_metrics(trainer, chain, changes, computes=self.pipe_rank == 0, warns=self.topology.data > 1)
        internals.set_metric_groups(module, self.groups.metrics, changes)
        if self.pipe_rank > 0:
            internals.skip_hooks_without_data(module, changes)
        if self.topology.replica_size > 1:  # summaries and graphs would run the model outside a step
            changes.set(module, "example_input_array", None)

    def _chain(self, over: Literal["pipe", "replica"]) -> Relay:
        """The chain over the ranks of the pipeline, or over all that train one copy of the model.

        It is there before the pipeline is set up: Lightning may read a stream's first batch early.
        """
        if over not in self._chains:
            assert self._failures is not None, "there once the processes have met"
            groups = self.groups
            ranks, control = (
                (groups.pipe_ranks, groups.control) if over == "pipe" else (groups.replica_ranks, groups.replica)
            )
            self._chains[over] = Relay(
                ProcessGroupTransport(
                    ranks,
                    control=control,
                    channels={},
                    device=self.root_device,
                    on_failure=self._failures.on_transfer,
                )
            )
        return self._chains[over]

    @override
    def model_to_device(self) -> None:
        """Done by the assembly, which knows what this rank holds."""

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            check_precision(precision_plugin)
        self._precision_plugin = precision_plugin

    def _clip(self, parameters: list[Tensor], max_norm: float) -> None:
        if self._cube is not None:
            clip_by_norm_of_parts(parameters, max_norm, self.groups.replica, self._cube.replicas)
        else:
            clip_by_norm(parameters, max_norm, self.groups.control if self.topology.pipe > 1 else None)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        cube_of = self._ranks_of_cube if prod(self.topology.cube) > 1 else None
        return loaders.process(dataloader, partial(self._chain, "pipe"), self.pipe_rank, cube_of)

    def _ranks_of_cube(self) -> dist.ProcessGroup:
        assert self.groups.cube is not None
        return self.groups.cube.whole

    # steps

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        trainer, batch_idx = module.trainer, module.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        scale = internals.expected_gradient(trainer)
        continues = internals.continues_accumulation(trainer, batch_idx)
        stopping = trainer.should_stop
        reduces, separate = not self._accumulating, continues and internals.may_scale_backward(trainer)
        handover = DeferredGradients(
            self.pipeline.parameters,
            continues=continues,
            keeps=internals.looks_at_old_gradients(trainer),
            separate=separate,
            finish=self.pipeline.reduce if separate and reduces else None,
        )
        with self.precision_plugin.train_step_context():
            result = self.pipeline.train(
                batch,
                internals.batch_key(trainer),
                lambda microbatch: module.training_step(microbatch, *args, **kwargs),
                partial(self._shares, sync=True),
                partial(MicrobatchLog, trainer),
                scale=scale,
                reduce=reduces and not separate,
            )
        handover.take()
        value = loss_of(result) if self.pipeline.rank == 0 else torch.zeros((), device=self.root_device)
        if self.topology.replica_size > 1:
            if trainer.should_stop != stopping:
                checks.refuse_stop()
            if reads_step_metrics(trainer, batch_idx, steps=not self._accumulating):
                value = connector_of(trainer).share_step(value)
        loss = handover.loss(value.reshape(()), scale).reshape(value.shape)  # a loss may have the shape [1]
        return {**result, "loss": loss} if isinstance(result, Mapping) else loss

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate(self.lightning_module.validation_step, batch, *args, **kwargs)  # type: ignore[union-attr]

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate(self.lightning_module.test_step, batch, *args, **kwargs)  # type: ignore[union-attr]

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate(self.lightning_module.predict_step, batch, *args, **kwargs)  # type: ignore[union-attr]

    def _evaluate(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        log_of = partial(MicrobatchLog, trainer)
        shares_of = partial(self._shares, sync=False)  # no gradients, so the data ranks needn't agree
        key = internals.batch_key(trainer)
        return self.pipeline.evaluate(batch, key, lambda part: step(part, *args, **kwargs), shares_of, log_of)

    def _shares(self, microbatches: Sequence[Any], *, sync: bool) -> Shares:
        """Evaluation may see batches without labels: it counts them by samples then."""
        group = self.groups.data_control if sync else None
        weight = self.options.loss_weight
        if not sync and (weight == "sum" or not counts_labels(microbatches, weight)):
            weight = "samples"
        return shares(microbatches, weight, num_data=self.topology.data, group=group)

    # checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        if self._pipeline is None or self.data_rank > 0:  # one pipeline's checkpoint is written
            return module.state_dict()
        ranks = self.pipeline.ownership.rank_of_names(module)
        return module_state(module, ranks, self.pipeline.chain.transport, self._cube)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self.data_rank > 0:
            return optimizer.state_dict()
        return optimizer_state(optimizer, self.pipeline.chain.transport, self._cube)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_module(self.lightning_module, checkpoint["state_dict"], self._cube, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer(optimizer, state, self._cube)
        internals.optimizers_to_device(self.optimizers, self.root_device)

    # end

    @override
    def on_exception(self, exception: BaseException) -> None:
        try:
            if self._failures is not None:
                self._failures.explain(exception)
        finally:
            self._part()
            if isinstance(self._launcher, CheckingLauncher):
                self._launcher.end()

    def _part(self) -> None:
        """Leave the other ranks after a failure: nobody here waits for them any more."""
        if self._failures is not None:
            self._failures.stop()
        self._changes.undo()
        if self._pipeline is not None:
            abandon(self._pipeline)
        for chain in self._chains.values():
            chain.forget()
            chain.transport.close()
        self._chains.clear()
        self._groups = None
        if _distributed_is_initialized():
            dist.destroy_process_group()

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        self._restores_late = False
        if self._failures is not None:
            self._failures.stop()
        self._changes.undo()
        for chain in self._chains.values():
            chain.finish()
        if self._pipeline is not None:
            disconnect(self._pipeline)
        internals.optimizers_to_device(self.optimizers, torch.device("cpu"))
        if module is not None:
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()
