"""`HanayoStrategy`: Lightning's hooks, each a few lines that say when something happens; the work is done elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hanayo.dist_checkpointing.export import open_weights
from lightning_hanayo.errors import HanayoError, PeerFailed, available
from lightning_hanayo.partition.stack import is_ambiguous
from lightning_hanayo.pipeline_parallel.capture.state import share_class_values
from lightning_hanayo.plotting.terminal_status import showing
from lightning_hanayo.strategy import run_batch
from lightning_hanayo.strategy.checkpointing import CheckpointingStrategy
from lightning_hanayo.strategy.checkpoints.load import check_start
from lightning_hanayo.strategy.checkpoints.save import check_plugin, check_saving
from lightning_hanayo.strategy.guarded_hooks import guarded_step_hooks
from lightning_hanayo.strategy.lightning.launcher import CheckingLauncher
from lightning_hanayo.strategy.lightning.loaders import check_sampler, end_workers_with_process, wrap_loader
from lightning_hanayo.strategy.lightning.state import move_optimizers, record_all_threads, unguard_states, unwrapped
from lightning_hanayo.strategy.lightning.user_hooks import defines_configure_model
from lightning_hanayo.strategy.options import Options, takes
from lightning_hanayo.strategy.planning import AT_START, plan_at_start, with_layout
from lightning_hanayo.strategy.restarts import write_error_file
from lightning_hanayo.strategy.session import Session
from lightning_hanayo.strategy.setup.checks import check_run, check_shapes
from lightning_hanayo.strategy.setup.optimizers import check_optimizers
from lightning_hanayo.strategy.setup.plan import plan_for
from lightning_hanayo.strategy.stopping import Interrupted, StoppedBySignal


class HanayoStrategy(CheckpointingStrategy):
    """Trains a LightningModule as a wave pipeline (Hanayo, SC'23), combined with data and 3-D tensor parallelism.

    The module stays unchanged. Its stack of blocks is cut into stages, which are assigned to the pipeline ranks in
    zig-zag (wave) order; its `training_step` runs on pipeline rank 0, once for each micro-batch.

    A model too large for one process is built on the meta device, in `configure_model` (`with torch.device("meta")`, or
    `self.trainer.init_module(empty_init=True)`): each rank creates what it holds, module by module, with values that
    are the same on every layout. They come from the modules' `reset_parameters`, those of the modules around them up to
    the LightningModule, and Hugging Face's `_init_weights`. If an `__init__` sets values in another way, the module is
    rejected with an error that names it.

    Example:
        >>> trainer = L.Trainer(accelerator="cpu", devices=4, strategy="hanayo")
        >>> trainer = L.Trainer(devices=8, strategy=HanayoStrategy(pipeline_parallel_size=4, data_parallel_size=2))

    Args:
        pipeline_parallel_size: P, the number of pipeline ranks; "auto": the ranks that data and cube leave over.
        num_waves: W; each pipeline rank holds 2W stages. More waves mean smaller bubbles and more messages. "auto":
            the number that is fastest in simulation. On one pipeline rank the stack is one stage, which runs as in a
            plain Trainer, unless a schedule is named.
        cube: 3-D tensor parallelism inside each stage: 1, p for a p x p x p cube, or (x, y, z).
        data_parallel_size: D, the number of pipelines, each on its own data; "auto": what pipeline and cube leave over,
            1 if the pipeline's size is "auto", too.
        num_microbatches: B, the pieces that a batch is cut into; a batch with fewer samples is cut into fewer.
            "auto": 2P.
        blocks: qualified name of the block stack, such as "model.layers"; None: the outermost list of blocks of one
            class that has the most parameters, or such blocks in a row in a `Sequential`; where it could be one of
            several lists, one that the step calls. Several names, or "a+b": modules that the step calls one after
            another, as the stages of a ResNet; "layer1[*]" stands for the modules of a `Sequential`. If there is a
            `ModuleList` among them: lists of as many modules, which are called in turn, a[0], b[0], a[1], b[1].
        loss_weight: a micro-batch's weight in the mean loss, where steps run per micro-batch: "samples", "tokens"
            (labels that aren't -100; of causal models of transformers those that the model counts), "shifted_tokens"
            (the same without each sequence's first label, `labels[..., 1:]`), or a function of the micro-batch that
            returns a number; "sum" for a loss that is a sum over samples. A probe checks it, and warns if another is
            right. "auto": what the probe finds (see `step`); "samples" with step="microbatch", where there is none.
        step: how often the step runs: once for each "microbatch", as `loss_weight` puts their losses together; or once
            for the whole "batch", of which the stack alone gets micro-batches. Then all code outside the stack
            computes what one process does, whatever the loss is. It costs time where that code is slow, as other
            ranks wait for it, and memory: it holds the whole batch, and ranks the activations of all micro-batches.
            "auto": validation and test as "batch", where that fits in memory; training per micro-batch, if dry runs of
            the step in the first batch of each epoch, and in some others, show by which rule micro-batches add up to
            the whole batch (samples, labels, sums of masks, or sums); else as "batch", where that fits, and the ranks
            of a cube don't share samples.
        activation_budget: the most activations that a rank may hold, in multiples of one micro-batch's (M_a); None: P.
        cube_outside: what each rank of a cube gets of a micro-batch outside the stack: "share", its own part of the
            samples; "replicate", all of them; or "tokens", all of them, too, but its own part of head and loss, for
            long sequences and large vocabularies: embedding and head stay sharded during a batch. The last is for
            causal models of transformers, and for steps that compute their loss with `chunked_cross_entropy`; others
            are rejected in the first training batch.
        schedule: the name of a schedule, the path of a CSV action table, or "auto": the wave that is fastest in
            simulation; "1f1b" for a stack of fewer than 2P blocks.
        balance: what blocks cost when the stack is cut: "parameters", "time" (measured on `example_input_array`), or
            one number per block.
        costs: times of stages and messages, for choosing waves and order: the path of the `profile.json` that an
            earlier run wrote; a `CostModel` in any unit, or its fields as a mapping; None: an estimate (T_B = 2 T_F,
            T_C = 0.05 T_F).
        cube_memory: what 3-D layers save for the backward: "gathered" operands, or "shards" that are gathered again.
        cube_weights: how often 3-D layers gather their weights along x, and reduce-scatter the gradients: once a
            "microbatch", or once a "batch". The latter holds the gathered weights of a rank's stages, and as much for
            their gradients, until the batch ends: worth it where micro-batches are small.
        cube_pieces: the number of pieces in which a 3-D product is computed, so that communication and computation
            overlap: worth it where both take long.
        pairs: in a cube, let a rank work on two micro-batches at once, the forward of one and the backward of another,
            so that the collectives of one hide behind the compute of the other. A rank holds one micro-batch more.
            Without a cube it does nothing: there is nothing to hide that isn't hidden.
        cube_tokens: tokens per micro-batch, for choosing how linear layers in unregistered blocks are sharded;
            None: 2048.
        cube_exclude: names of modules in blocks whose linear layers stay whole while a batch runs, with those inside
            them, such as "experts" or "mlp.extra": layers that some samples skip, which not all ranks of a cube call.
        experts: where the experts of mixtures of transformers are while a batch runs, if their weights are fused, as in
            Mixtral, Qwen3-MoE and DeepSeek-V3: all of a block's are "whole" on each rank of a cube; or the ranks of y
            and z share them ("cube"), replicated over x, and tokens are sent to their experts and back.
        timeout: how long a transfer may take before it counts as failed: a timedelta, or a number of seconds.
        batch_dim: the dimension of the samples in a batch's tensors, 1 if they are sequence-first, [seq, batch, ...].
            Tensors without it are cut along dimension 0, labels [batch]; and so are tensors with fewer dimensions than
            others that have the number of samples only there, masks [batch, seq].
        split_batch: a function of a batch and a number n that returns a list of 1 to n micro-batches, instead of the
            usual rule. In a cube it is called once more with each micro-batch and the number of ranks that share it.
        whole: names of what is the same for all samples, and stays whole: keys of mappings, and fields of dataclasses,
            on any level.
        init_from: a folder with `model.safetensors`, or `model.safetensors.index.json` and its files, as
            `save_pretrained` of transformers writes it; or a checkpoint folder, of which only the weights are taken.
            The model's first values come from there; each rank reads only its own. Build the model in
            `configure_model`: it has no values until they are read. A dictionary gives folders by the names of the
            modules that they are for.
        master_weights: "fp32": parameters in bf16 or fp16 (`precision="bf16-true"`) get fp32 gradients, in which
            micro-batches and ranks are added up, and fp32 master weights, which the optimizer updates and checkpoints
            hold: with Adam 18 bytes per parameter instead of 8. None: all have the parameters' dtype, as in a Trainer.
        recompute: what keeps its inputs alone and runs again in the backward: "none"; "blocks", all of the stack's;
            "attention", the attention in each of them; n, the first n blocks of each stage, and fewer on pipeline ranks
            that hold fewer micro-batches; or a function of a block's name and the block that says whether it does.
        shard_optimizer: whether each data rank updates its own rows of every parameter, and has the optimizer's states
            and master weights of those alone (ZeRO-1), so that they take 1/D of the memory. Parameters are whole in
            forward and backward. Optimizers of whole parameters, such as Muon, step each on one rank instead.
        offload_optimizer: whether the optimizer's states, and master weights, are in host memory, where it steps: for
            each step gradients are copied there, and parameters back.
        tied_gradients: when the gradients of a weight that embedding and head share are added: "in_order", the two of
            each micro-batch to each other first, as one process does, which keeps the head's until the embedding's is
            there; or "at_once", without keeping any, in another order, so that the last bits differ.
        save_full: how runs of several ranks save: False, a checkpoint is a folder in which each rank writes what it
            holds, and that any layout reads; True, one file that `torch.load` reads, for which rank 0 gathers the whole
            model and optimizer in its memory. One rank always saves one file, and weights alone are one, too.
        save_async: whether training goes on while a checkpoint is written: a save copies what the rank holds to host
            memory, and a thread writes it. An error of that thread is raised on all ranks before the next batch.
        verify_checkpoints: whether all bytes of a checkpoint are compared with their hashes before it is loaded; sizes
            always are.
        load_anyway: problems that only cause a warning when a checkpoint is loaded, instead of an error: "nan", NaN or
            infinite weights; "dtype", weights that are converted; "optimizer_state", missing states, which start anew;
            "samples", another number of samples per optimizer step.
        nonfinite: what happens before an optimizer step if a gradient on any rank is NaN or infinite: "raise", all
            ranks raise one `NonFiniteError` that says where the first such value was made; "skip", no rank steps, and a
            warning says so; "ignore", the optimizer steps, as in a plain Trainer. A gradient scaler ("16-mixed") skips
            its own steps; "raise" then is about losses, and scales that have become useless.
        check_replicas: after how many optimizer steps ranks that hold the same parameters (data ranks; in a cube, those
            with the same part) compare hashes of them, again and again. A difference is an error on all ranks, which
            names the first parameter that differs. None: they aren't compared.
        restore_module: whether each run ends with the whole module on every rank, for libraries that go on with it
            themselves, such as gluonts; every rank needs memory for it. False: ranks keep their parts.
        layout: the path of a `plan.yaml` that `hanayo plan` wrote, in place of the options that it sets; the loader's
            batch size and `accumulate_grad_batches` are to be those of the file. Or "plan", which finds the fastest
            sizes of pipeline, waves, data ranks, cube and micro-batches when training starts, by the data sheet of the
            devices, and says so in a line.

    Raises:
        HanayoError: a bad value, or sizes that need another number of processes; before any of them starts.
    """

    strategy_name = "hanayo"

    @takes(Options)
    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(Options(**with_layout(arguments)))
        self._accumulates = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Leave out threads, groups and connections of this process and its run: a run makes them anew."""
        state: dict[str, Any] = super().__getstate__()
        return state | dict.fromkeys(("_groups", "_failures", "_session", "_resume")) | {"_names_in_fit": {}}

    # set-up

    @override
    def after_launch(self) -> None:
        """The Trainer returns: what follows isn't watched, whose stack would be read while it runs."""
        if self._session is not None:
            self._session.stop_watching()

    @override
    def check_before_launch(self, trainer: "pl.Trainer", ckpt_path: Any = None) -> None:
        """Called before any process starts."""
        self._plan_sizes(trainer)
        self._check(trainer)
        check_start(ckpt_path, trainer, self.checkpoint_io)
        # Ranks that were started may find a folder missing on their node: they say so once all ranks can hear it.
        options = self.options if self.global_rank == 0 else replace(self.options, init_from=None)
        prepared = self._prepared_module
        if defines_configure_model(self.module):
            for folder in options.init_folders.values():
                open_weights(folder)
        elif prepared.fits(self.module, self.topology, self.options):
            with self._unguarded():
                check_shapes(self.module)
                if options.stack is None and self.topology.replica_size > 1 and is_ambiguous(self.module):
                    return  # which stack is cut depends on a step's calls, once there is a batch
                plan_for(trainer, self.module, prepared, options, self.topology)

    def _plan_sizes(self, trainer: "pl.Trainer") -> None:
        """Choose the sizes if that was asked for, once: later runs of the Trainer have the same."""
        if self.options.layout != AT_START:
            return
        if trainer.state.fn != TrainerFn.FITTING:
            advice = "Call fit first, or give the sizes, such as pipeline_parallel_size=2"
            raise HanayoError(f"layout={AT_START!r} chooses when training starts, and this run doesn't train. {advice}")
        assert isinstance(self.launcher, CheckingLauncher)
        given = self.launcher.arguments
        data = given.get("train_dataloaders") if given.get("datamodule") is None else given["datamodule"]
        self.options = plan_at_start(self, trainer, data)
        self.set_world_ranks()

    def _check(self, trainer: "pl.Trainer") -> None:
        syncs = self.synchronizes_batchnorm
        check_run(trainer, self.module, self.options, self.topology, syncs_batchnorm=syncs)
        if trainer.state.fn == TrainerFn.FITTING:
            check_plugin(self.options, self.topology, self.checkpoint_io)

    @override
    def connect(self, model: "pl.LightningModule") -> None:
        super().connect(model)
        share_class_values(model)
        record_all_threads(model)  # before the run's first action

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.show_compiled()
        self._kept = self._resume = None  # of a run that has failed
        self.connect_processes()
        if self._session is not None:
            self._session.stop_watching()
        trainer, rank, device = self.module.trainer, self.global_rank, self.root_device
        self._session = Session(
            trainer, self.options, self.topology, self.groups, self.failures, rank=rank, device=device
        )
        if self.world_size > 1:
            vars(trainer).setdefault("save_checkpoint", partial(self._save, trainer))
        self._session.begin(self.checkpoint_io)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        available(self.accelerator, "the accelerator is set by the Trainer").setup(trainer)
        with self._unguarded():
            if self._kept is not None:
                self._kept.drop_replaced(self.module)
            self._kept = self.session.averages.loaded(self.module) or self._kept
            self.model = self.precision_plugin.convert_module(self.module)
            fits = trainer.state.fn == TrainerFn.FITTING
            if fits and self.topology.data > 1:  # one rank's are over all already
                self.synchronize_batchnorm(self.model)
        self._check(trainer)  # again, for a model that `configure_model` has built since
        with showing("planning and building the stages") if self.global_rank == 0 else nullcontext():
            self.session.set_up(self._kept)
        if self.topology.replica_size > 1:
            self.session.averages.cut(self._state_of)
        if fits:
            self.setup_optimizers(trainer)
            unguard_states(self.optimizers, None if self.session.cube is None else self.session.cube.shard)
            check_optimizers(self.optimizers, self.topology, is_sharded=self.session.steps.shards is not None)
        self.setup_precision_plugin()
        if fits:
            move_optimizers(self.optimizers, self._states_device)
            self.session.prepare_steps(list(map(unwrapped, self.optimizers)), self._kept)
            self.session.steps.guard_states(self.optimizers)
            self._names_in_fit = self.session.names
            check_saving(trainer, self.module, self.session.checkpoints)
            self.session.find_held_bytes(self.module)
        self._kept = None

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """An empty model is built on the meta device: `setup` gives it values, on the ranks that need them.

        With `init_from` that is the default, as in `configure_model`.
        """
        if empty_init is None:
            empty_init = self.options.init_from is not None
        with super().tensor_init_context(empty_init=False), torch.device("meta") if empty_init else nullcontext():
            yield

    @override
    def model_to_device(self) -> None:
        """Done by `setup`, which knows this rank's parameters."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        check_sampler(dataloader, num_data=self.topology.data, num_ranks=self.topology.world_size)
        if self._session is not None:  # user code may ask a loop for its loaders before any run
            end_workers_with_process(dataloader, self.global_rank, self._session.attributes)
        is_shortened = self._processes_training_loaders and self.topology.data > 1
        with self._unguarded():
            return wrap_loader(dataloader, self._get_run, self.topology, self.pipe_rank, is_shortened=is_shortened)

    def _get_run(self) -> Session:
        """For loaders, when they are iterated, also in a copied Trainer: there may be no run before."""
        return self.session

    @override
    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        if name == "pre_setup":  # after `prepare_data`, which runs on one rank of each node
            self.session.generators.share()

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self.session.guard.scope == "off":  # else it is the user who calls this
            self.session.hand_over.before_batch()
        return batch

    # steps

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = partial(self.module.training_step, **kwargs)
        with self._unguarded(), self.precision_plugin.train_step_context():
            self.session.steps.check()
            self.session.checkpoints.poll()
            if not self.module.automatic_optimization:
                return run_batch.run(self.session, batch, step, args, is_manual=True)
            return run_batch.train(self.session, batch, step, args, steps=not self._accumulates)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if not (self.module.automatic_optimization or self._accumulates):
            run_batch.average_gradients(self.session)

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate(self.module.validation_step, batch, *args, **kwargs)

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate(self.module.test_step, batch, *args, **kwargs)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate(self.module.predict_step, batch, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        closure = self.session.guard.in_this_scope(closure)  # the user's, around Lightning's
        hooks = guarded_step_hooks(unwrapped(optimizer), self.session.guard, why_not=self.session.steps.why_no_hooks)
        with self._unguarded(), hooks:  # also from a user's hook
            step = partial(self.session.votes.step, step)
            result = self.session.nonfinite.step(step, optimizer, closure)
            self.session.steps.end_step()
            return result

    def _evaluate(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self._unguarded():
            return run_batch.run(self.session, batch, partial(step, **kwargs), args)

    @override
    def on_train_start(self) -> None:
        self.session.say_what_runs()
        if self._resume is not None:
            self._resume.start(self.session.choice)
            self._resume = None

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with self._unguarded():
            if self.options.check_replicas is not None:
                self.session.finish_gather()
            self.session.replica_check.after(self.module.trainer.global_step)

    @override
    def on_train_end(self) -> None:
        with self._unguarded():
            self.session.finish_gather()
            self.session.nonfinite.read_late()
            self.session.replica_check.after(self.module.trainer.global_step)

    # end

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(exception, StoppedBySignal | Interrupted):  # all ranks are between two batches: it ends in order
            if self.is_global_zero:
                print(f"hanayo: {exception.report}", file=sys.stderr, flush=True)
            return
        is_consequence = False
        try:
            if self._failures is not None:
                self._failures.explain(exception)
            write_error_file(exception)
        except PeerFailed as consequence:
            is_consequence = True
            write_error_file(consequence)
            raise
        finally:
            self._abandon()
            if is_consequence:  # an error that is raised here leaves Lightning's handler, which would tear down
                self.tear_down_trainer()

    def _save(
        self, trainer: "pl.Trainer", filepath: Any, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """`Trainer.save_checkpoint`. After a run an error of one rank, of a hook, ends it on all, as in a run."""

        def save() -> None:
            with self.session.checkpoints.one_file() if weights_only else nullcontext():
                type(trainer).save_checkpoint(trainer, filepath, weights_only, storage_options)

        failures = self._failures
        if failures is None or not failures.is_over:
            return save()
        failures.begin(self.abort_transfers)
        try:
            save()
        except BaseException as error:
            if not getattr(error, "is_common", False):
                try:
                    failures.explain(error)
                finally:
                    self._abandon()
            raise
        finally:
            failures.stop()

    def _abandon(self) -> None:
        """Leave the run after a failure. A script that catches the error may start the next one."""
        self.abort_transfers()  # first: all else may wait for the device
        if self._session is not None:
            self._session.abandon()
        if self.lightning_module is not None:
            self._prepared_module.lose(self.module)
        self.disconnect_processes()
        if self._session is not None:
            self._session.drop_transfers()
        if isinstance(self.launcher, CheckingLauncher):
            self.launcher.end()

    @override
    def teardown(self) -> None:
        self._kept = None
        if self._session is not None:
            self._session.close()
        # After a failure Lightning shows the error of this method, if there is one, instead of the first error.
        with suppress(Exception) if self._failures is None else nullcontext():
            move_optimizers(self.optimizers, torch.device("cpu"))
            if self.lightning_module is not None:
                with self._unguarded():  # placeholders, and stand-ins for buffers of other ranks, stay as they are
                    self.lightning_module._apply(_to_host)
        if self._session is not None:
            self._session.guard_module()
        self.precision_plugin.teardown()
        available(self.accelerator, "the accelerator is set by the Trainer").teardown()
        self.checkpoint_io.teardown()
        self.environment.teardown()


def _to_host(value: Any) -> Any:
    """The tensor in host memory; a placeholder, or the stand-in of another rank's buffer, as it is."""
    return value.cpu() if isinstance(value, Tensor) and not value.is_meta else value
