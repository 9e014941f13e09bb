"""Checkpoints: Lightning's hooks that save and load, and the methods that give user code the whole model."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hanayo.dist_checkpointing.commit import RankPart
from lightning_hanayo.dist_checkpointing.plain_file import gather_module_state, gather_optimizer_state
from lightning_hanayo.errors import HanayoError, UnsupportedError, available
from lightning_hanayo.partition import guards
from lightning_hanayo.pipeline_parallel.object_collectives import broadcast_object
from lightning_hanayo.strategy.checkpoints import parts, save
from lightning_hanayo.strategy.checkpoints.load import Checkpoint, KeptValues, load_optimizers, read_checkpoint
from lightning_hanayo.strategy.checkpoints.resume import Resume, resume_state, saved_run
from lightning_hanayo.strategy.joining import is_lost_connection
from lightning_hanayo.strategy.lightning.parallel_strategy import MeshParallelStrategy
from lightning_hanayo.strategy.lightning.state import move_optimizers, unwrapped
from lightning_hanayo.strategy.optimizer_shards import OptimizerShards
from lightning_hanayo.strategy.optimizer_steps import reading_states
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.session import Session
from lightning_hanayo.strategy.setup.prepared_model import Cube, PreparedModel
from lightning_hanayo.strategy.user_code.collectives import UserCollectives


class CheckpointingStrategy(MeshParallelStrategy):
    """Lightning's hooks that save and load, and the methods that give user code what no rank holds alone."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._session: Session | None = None
        self._resume: Resume | None = None
        self._kept: KeptValues | None = None
        self._names_in_fit: Mapping[Tensor, str] = {}

    @property
    def session(self) -> Session:
        """The run of the Trainer under way, or the last one."""
        return available(self._session, "the session exists once the Trainer has started a run")

    @property
    def pipeline(self) -> Pipeline:
        """This rank's part of the pipeline; it exists while the Trainer runs."""
        return self.session.pipeline

    @property
    def _names(self) -> dict[Tensor, str]:
        """The names of parameters, also of those that the optimizers have: another run may have cut the module anew."""
        return {**self._names_in_fit, **self.session.names}

    @property
    def _prepared_module(self) -> PreparedModel:
        """The changes that runs have made to the current module."""
        return PreparedModel.of(self.module)

    # for user code

    @property
    @override
    def user_collectives(self) -> UserCollectives | None:
        collectives = None if self._session is None else self._session.collectives
        return collectives if collectives is not None and collectives.is_user_code else None

    def full_parameter(self, parameter: Tensor) -> Tensor:
        """Return the whole of a parameter, of which this rank may hold a part or nothing.

        In hooks that run on all ranks: all of them call it, for the same parameters in the same order. The steps of a
        batch may use the result of a call in `on_train_batch_start`: its gradient is added to the parameter's at the
        end of the batch. Other hooks get a copy of the values.

        In steps: all ranks of the cube call it. It returns parameters of this pipeline rank, with a gradient; those of
        other pipeline ranks only if `on_train_batch_start` has asked for them.

        Example:
            >>> def on_train_batch_start(self, batch, batch_idx):
            ...     full = self.trainer.strategy.full_parameter
            ...     self.matrices = [full(p) for p in self.blocks.parameters() if p.dim() > 1]
            >>> def training_step(self, batch, batch_idx):
            ...     return self.loss(batch) + 0.01 * sum(w.square().sum() for w in self.matrices)

        Args:
            parameter: one of the LightningModule's.

        Returns:
            A tensor of the parameter's whole shape, in this rank's memory.

        Raises:
            HanayoError: it is no parameter of the module.
            UnsupportedError: the parameter's pipeline rank doesn't run this code.
        """
        whole: Tensor = self.pipeline.gradients.full_parameters.get(parameter)
        return whole

    def gather_model(self, module: "pl.LightningModule | None" = None) -> "pl.LightningModule | None":
        """Return a whole, ordinary copy of the module on global rank 0, in CPU memory; None on all other ranks.

        Called by all ranks: after `fit`, or in a hook that runs on all of them. One parameter after another is sent, so
        only rank 0 needs memory for the whole model. The copy belongs to you: it can be called, saved, exported, or
        given to another Trainer, and what happens to it doesn't change the module that is trained.

        Example:
            >>> trainer.fit(module)
            >>> whole = trainer.strategy.gather_model()
            >>> if whole is not None:  # on rank 0
            ...     whole.model.save_pretrained("trained")

        Args:
            module: the LightningModule of the Trainer's last run, which is the default.

        Raises:
            HanayoError: it is another module.
            UnsupportedError: the module can't be copied, or a run of it has failed, or this is called in a step.
        """
        if module is not None and module is not self.module:
            raise HanayoError(
                f"gather_model takes the LightningModule of the Trainer's last run, a {type(self.module).__name__}; "
                f"got a {type(module).__name__}. What it returns has all parts: gather_model().encoder."
            )
        return self.session.gather_model()

    def _unguarded(self) -> AbstractContextManager[None]:
        """Entered while Lightning's code runs, or ours, which user code may have called, in a run or after it."""
        if self._session is not None and self._session.is_running:
            return self._session.guard.off()
        return nullcontext() if self.lightning_module is None else guards.released(self.module)

    # checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module, session = self.module, self._session
        if session is not None:
            session.saves_on_exception.check()
            session.guard.check_all_ranks("trainer.save_checkpoint")
        with self._unguarded(), self._master_values():
            self._prepared_module.check(module)
            if session is None or not session.has_pipeline:
                return module.state_dict()
            if not session.is_running:
                self._prepared_module.check_loads()
                if self.options.restore_module and self.topology.replica_size > 1:
                    error = UnsupportedError(
                        "restore_module=True has made the module whole, so that ranks have no parts left to save. Save "
                        "in the run, by a callback such as ModelCheckpoint, or torch.save(module.state_dict(), path)."
                    )
                    error.is_common = True
                    raise error
            return self._state_of(module, session.steps.sharding_in_use)

    def _state_of(self, module: nn.Module, sharding: Cube | OptimizerShards | None) -> dict[str, Any]:
        """For checkpoints: of the module, or of a copy of it that is cut in the same way."""
        ranks = self.pipeline.ownership.rank_by_name(self.module)
        if self.session.checkpoints.is_sharded:
            return parts.module_state(module, sharding, ranks, self.root_device)
        if self.data_rank > 0 and not isinstance(sharding, OptimizerShards):  # one pipeline writes the checkpoint
            return module.state_dict()
        transport = self.session.pipe_relay.transport
        return gather_module_state(module, ranks, transport, sharding, gathers=self.data_rank == 0)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer, steps = unwrapped(optimizer), self.session.steps
        with self._unguarded(), reading_states(optimizer):
            if self.session.checkpoints.is_sharded:
                return parts.optimizer_state(optimizer, self._names, steps)
            if steps.all_ranks is not None:
                return gather_optimizer_state(optimizer, steps.all_ranks, is_here=steps.updates)
            if self.data_rank > 0 and steps.shards is None:  # one pipeline writes the checkpoint
                return optimizer.state_dict()
            transport = self.session.pipe_relay.transport
            return gather_optimizer_state(optimizer, transport, steps.sharding, gathers=self.data_rank == 0)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        session = self._session
        if session is None:  # before the first run
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with self._unguarded():
            resumes = "optimizer_states" in checkpoint and session.is_running
            state = resume_state(session, session.choice) if resumes else None

            def own_part(content: Mapping[str, Any]) -> RankPart:
                return parts.rank_part(content, session.steps, self._names, state)

            if resumes and session.restarts is not None:
                session.restarts.note(filepath)
            try:
                is_cut = session.has_pipeline  # it isn't before the model is set up
                session.checkpoints.save(checkpoint, filepath, own_part if is_cut else None, state, storage_options)
                # no batch may follow, before which an error could be raised
                if not session.is_running or save.ends_job(filepath):
                    session.checkpoints.finish()
            except HanayoError as error:
                error.is_common = not is_lost_connection(error)
                raise

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self._session is None:  # before the first run
            super().remove_checkpoint(filepath)
            return
        self._session.checkpoints.remove(filepath)
        if self._session.restarts is not None:
            self._session.restarts.forget(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if self._session is not None:
            self._session.guard.check_all_ranks("load_checkpoint")
        verify = self.options.verify_checkpoints
        checkpoint_path = broadcast_object(checkpoint_path)  # each rank makes one up in Tuner.scale_batch_size
        with self._unguarded():
            if self._session is not None:
                self._session.checkpoints.finish()  # it may be the one that is still being written
            return read_checkpoint(checkpoint_path, self.checkpoint_io, weights_only=weights_only, verify=verify)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.options.init_from is not None:
            rank_zero_info("The checkpoint's values replace those of init_from.")
        with self._unguarded():
            source, cube = Checkpoint.source_of(checkpoint), self._prepared_module.cube
            kept = KeptValues(self.module, checkpoint["state_dict"], source, self.options, strict=strict)
            if self._session is None or not self._session.has_pipeline:
                self._kept = kept  # `setup` puts it into the parts that the ranks will have
                return
            self._session.finish_gather()
            kept.check(self.module, cube)
            kept.put_in(self.module, cube)
            if self.options.master_weights is not None:
                with self._master_values():
                    kept.put_in(self.module, self._session.steps.sharding_in_use)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        with self._unguarded(), self._master_values():  # torch casts states to the parameters' dtype
            load_optimizers(checkpoint, self._names, self.session.steps)
            move_optimizers(self.optimizers, self._states_device)
        self._resume = Resume(self.session, saved_run(checkpoint))

    @property
    def _states_device(self) -> torch.device:
        return torch.device("cpu") if self.options.offload_optimizer else self.root_device

    def _master_values(self) -> AbstractContextManager[None]:
        """Inside it, parameters have the values that the optimizer updates."""
        session = self._session
        return session.steps.master_values() if session is not None and session.has_pipeline else nullcontext()
