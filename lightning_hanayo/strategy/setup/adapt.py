"""Adapts Trainer, callbacks and module to a run on several ranks, until the attributes of the run are restored."""

from collections.abc import Callable

import lightning.pytorch as pl

from lightning_hanayo.pipeline_parallel.rng import SharedGenerators
from lightning_hanayo.strategy import guarded_hooks, votes
from lightning_hanayo.strategy.lightning import inspection, loaders, metrics
from lightning_hanayo.strategy.lightning.loops import before_validations, keep_inference_mode
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.user_code.collectives import Progress
from lightning_hanayo.strategy.user_code.hand_over import HandOver


def adapt(
    run: Run,
    trainer: "pl.Trainer",
    module: "pl.LightningModule",
    pipeline: Callable[[], Pipeline],
    generators: SharedGenerators,
    progress: Progress,
    hand_over: HandOver,
) -> None:
    """Let hooks, metrics, loaders and loops know of the other ranks. Called by all ranks, once the model is set up.

    `pipeline` is the one of this rank, which a hook may have built anew.
    """
    topology, attributes, first = run.topology, run.attributes, run.replica_relay.transport.rank == 0
    several, is_sample_rank = topology.replica_size > 1, run.pipe_rank == 0
    guarded_hooks.guard_hooks(
        trainer,
        run.guard,
        attributes,
        num_pipe_ranks=topology.pipe,
        pipe_rank=run.pipe_rank,
        end_hook=progress.end_hook,
    )
    guarded_hooks.guard_writers(trainer, run.guard, attributes, writes=first, is_alone=several)

    def at_epoch_end() -> None:
        progress.end_epoch()
        hand_over.at_epoch_end()

    # The ranks of a cube log the same values: rank 0's are used for all of them.
    metrics.share_metrics(
        trainer,
        run.replica_relay,
        attributes,
        computes=is_sample_rank,
        warns=topology.data > 1,
        at_epoch_end=at_epoch_end,
    )
    keep_inference_mode(trainer, attributes)
    loaders.after_new_iterators(trainer, attributes, generators.share)
    if topology.world_size > 1:
        votes.vote_on_steps(module, attributes)
    if several:
        votes.agree_after_hooks(trainer, module, attributes)
    metrics.sync_metrics_over(module, run.groups.metrics, attributes)
    if not is_sample_rank:
        loaders.skip_hooks_without_data(module, attributes)
    if topology.data > 1:
        before_validations(trainer, attributes, lambda: pipeline().step_state.update_over_data())
    if not pipeline().is_single:
        inspection.follow_steps(trainer, pipeline().ownership.stack, attributes)
    inspection.count_batches_once(trainer, topology)
