"""Adapts Trainer, callbacks and module to a run on several ranks, until the attributes of the run are restored."""

from lightning_hanayo.strategy import guarded_hooks
from lightning_hanayo.strategy.lightning import loaders, metrics, state, user_hooks
from lightning_hanayo.strategy.lightning.loops import keep_inference_mode
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.user_code.hand_over import HandOver
from lightning_hanayo.strategy.votes import StepVotes, agree_after_hooks


def adapt(run: Run, hand_over: HandOver, votes: StepVotes) -> None:
    """Let hooks, metrics, loaders and loops know of the other ranks. Called by all ranks, once the model is set up."""
    trainer, module, topology, attributes = run.trainer, run.module, run.topology, run.attributes
    guarded_hooks.guard_hooks(run, run.failures.end_hook)
    guarded_hooks.guard_writers(run)
    metrics.share_metrics(run, hand_over.at_epoch_end)
    keep_inference_mode(trainer, attributes)
    loaders.after_new_iterators(trainer, attributes, run.generators.share)
    if topology.world_size > 1 and user_hooks.defines(module, "optimizer_step"):
        attributes.wrap(module, "optimizer_step", votes.run_override)
    if topology.replica_size > 1:
        agree_after_hooks(run)
    metrics.sync_metrics_over(module, run.groups.metrics, attributes)
    if run.pipe_rank > 0:
        loaders.skip_hooks_without_data(module, attributes)
    if topology.data > 1:  # the pipeline may be built anew
        validation = trainer.fit_loop.epoch_loop.val_loop
        attributes.before(validation, "run", lambda: run.pipeline.step_state.update_over_data())
    if not run.pipeline.is_single:
        state.follow_steps(trainer, run.pipeline.ownership.stack, attributes)
    state.count_batches_once(trainer, topology)
