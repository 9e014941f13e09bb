"""Adapts Trainer, callbacks and module to a run on several ranks, until the attributes of the run are restored."""

from typing import TYPE_CHECKING

from lightning_hanayo.strategy import guarded_hooks, votes
from lightning_hanayo.strategy.lightning import inspection, loaders, metrics, user_hooks
from lightning_hanayo.strategy.lightning.loops import keep_inference_mode

if TYPE_CHECKING:
    from lightning_hanayo.strategy.session import Session


def adapt(session: "Session") -> None:
    """Let hooks, metrics, loaders and loops know of the other ranks. Called by all ranks, once the model is set up."""
    trainer, module, topology, attributes = session.trainer, session.module, session.topology, session.attributes
    guarded_hooks.guard_hooks(session, session.progress.end_hook)
    guarded_hooks.guard_writers(session)

    def at_epoch_end() -> None:
        session.progress.end_epoch()
        session.hand_over.at_epoch_end()

    metrics.share_metrics(session, at_epoch_end)
    keep_inference_mode(trainer, attributes)
    loaders.after_new_iterators(trainer, attributes, session.generators.share)
    if topology.world_size > 1 and user_hooks.overrides(module, "optimizer_step"):
        attributes.wrap(module, "optimizer_step", session.votes.run_override)
    if topology.replica_size > 1:
        votes.agree_after_hooks(session)
    metrics.sync_metrics_over(module, session.groups.metrics, attributes)
    if session.pipe_rank > 0:
        loaders.skip_hooks_without_data(module, attributes)
    if topology.data > 1:  # the pipeline may be built anew
        validation = trainer.fit_loop.epoch_loop.val_loop
        attributes.before(validation, "run", lambda: session.pipeline.step_state.update_over_data())
    if not session.pipeline.is_single:
        inspection.follow_steps(trainer, session.pipeline.ownership.stack, attributes)
    inspection.count_batches_once(trainer, topology)
