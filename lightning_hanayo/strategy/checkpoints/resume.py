"""What a checkpoint holds besides Lightning's values, so that a resumed run equals the one that was not interrupted.

one document, from rank 0           the seed of the random streams, samples per step, the layout
one per data rank, where it reads   the states of its loaders
tensors                             random/<rank>/now/<generator>, random/<rank>/before/<generator> before a batch
                                    that was read ahead, gradient/<number>/<parameter> between two steps

`resume_state` collects it on each rank; `Resume` puts it back, on any layout, and says what can't be put back.

Where a checkpoint stores what a resume needs: in a folder each rank its part; in one file all of it, under one key.

             a folder                                               one file
the run      state.json: checkpoint["lightning_hanayo"]["run"]      checkpoint["lightning_hanayo"]["run"]
data ranks   state-data-00001.json, written where data is read      ["data"][1]
tensors      random/..., gradient/..., data/1/<n>: in any file      ["tensors"], gathered on rank 0, whole

Gradients that have been added up since the last optimizer step, by name, as they are before the sum over ranks.

    data rank 0     gradient/0/head.weight        each data rank has a sum over its own batches; in a cube there may be
    data rank 1     gradient/1/head.weight        one for each rank along the axes over which it is still partial

Of as many ranks each gets its own back, so that later sums are the same to the last bit. Else all are added up on as
many ranks as there are: 4 read by 2 are 0 + 2 and 1 + 3.
"""

import re
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing.commit import RankPart, TensorPart
from lightning_hanayo.dist_checkpointing.compare import data_parts
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.state import RUN
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor
from lightning_hanayo.errors import CheckpointError, HanayoError
from lightning_hanayo.pipeline_parallel.rng import generator_states, set_generators
from lightning_hanayo.strategy.lightning import loops
from lightning_hanayo.strategy.lightning.loops import (
    batch_size,
    generators_of_loaders,
    has_persistent_workers,
    have_more,
    loader_states,
    random_states_before,
    stateful_loaders,
)
from lightning_hanayo.strategy.losses import WAY_OUT, StepSamples, accumulation
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.tensor_parallel.sharding import Shard
from lightning_hanayo.topology import Topology
from lightning_hanayo.weight_gradients import gradient_dtype

if TYPE_CHECKING:
    from lightning_hanayo.strategy.probing.step_choice import StepChoice


PREFIX = "gradient/"
_NAME = re.compile(r"gradient/[0-9]{1,9}/.")


def accumulated_gradients(run: Run) -> Iterator[TensorPart]:
    """What this rank writes of the gradients between two batches: what no other rank has, or has written."""
    for name, parameter, shard, number, _ in _summed_parameters(run):
        differing = shard.axes + shard.partial
        is_first = not run.mesh.index("".join(axis for axis in "xyz" if axis not in differing))
        if parameter.grad is not None and is_first:
            region, grad = run.region_of(parameter), parameter.grad.detach()
            yield TensorPart(f"{PREFIX}{number}/{name}", grad, shard.shape, region, "optimizer")


def restore_gradients(run: Run, saved: "SavedRun") -> None:
    """Set this rank's gradients to those that were saved."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for full_name in filter(_NAME.match, saved.tensors):
        digits, _, name = full_name.removeprefix(PREFIX).partition("/")
        numbers[name].append(int(digits))
    for name, parameter, _, own, count in _summed_parameters(run):
        region, total = run.region_of(parameter), None
        options: Any = {"device": parameter.device, "dtype": gradient_dtype(parameter)}
        for number in sorted(one for one in numbers[name] if one % count == own):
            part = saved.read(f"{PREFIX}{number}/{name}", region).to(**options)
            total = part if total is None else total.add_(part)
        if total is not None:  # with the parameter's strides
            parameter.grad = torch.empty_like(parameter, dtype=options["dtype"]).copy_(total)


def _summed_parameters(run: Run) -> Iterator[tuple[str, nn.Parameter, Shard, int, int]]:
    """Yields this rank's parameters: the name, and how the ranks of a cube hold it.

    And this rank's number among those whose gradients are summed before a step, and how many these are.
    """
    for name, one in run.module.named_parameters():
        if not one.is_meta and one.requires_grad:
            shard = run.shard_of(one)
            index, size = run.mesh.index(shard.partial), run.mesh.size(shard.partial)
            yield name, one, shard, run.data_rank * size + index, run.topology.data * size


KEY = RUN
"""of Lightning's dictionary"""
_WHEN = ("now", "before")


@dataclass(frozen=True)
class ResumeState:
    """What one rank adds to a checkpoint."""

    document: Mapping[str, Any]
    """of the whole run; rank 0's counts"""
    data: Mapping[int, Mapping[str, Any]]
    """the document of this data rank by its number, on the rank that reads its data; empty where there is nothing"""
    tensors: Sequence[TensorPart]


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint says of the run that saved it, however it is stored."""

    document: Mapping[str, Any]
    data: Mapping[int, Any]
    """of data ranks: the states of its loaders, and whether they could have given more batches; or what reads it"""
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        """Check the document, which a stranger may have written."""
        try:
            numbers = (self.document["seed"], self.layout["num_microbatches"], *vars(self.samples).values())
            is_possible = all(type(number) is int for number in (*numbers, *self.topology.sizes))
        except (AttributeError, HanayoError, KeyError, TypeError, ValueError):
            is_possible = False
        if not is_possible:
            raise CheckpointError("What the checkpoint says of its run doesn't have the form that a save gives it.")

    @property
    def samples(self) -> StepSamples:
        """What an optimizer step took."""
        return StepSamples(**self.document["samples"])

    @property
    def layout(self) -> dict[str, Any]:
        """The sizes of the layout, and the number of micro-batches."""
        return dict(self.document["layout"])

    @property
    def topology(self) -> Topology:
        """The ranks that saved."""
        return Topology(data=self.layout["data"], pipe=self.layout["pipe"], cube=tuple(self.layout["cube"]))

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were accumulated when it was saved."""
        return any(name.startswith(PREFIX) for name in self.tensors)

    def data_document(self, data_rank: int) -> Mapping[str, Any]:
        """What was saved of a data rank; empty if its loaders had no state."""
        found = self.data.get(data_rank, {})
        document: Mapping[str, Any] = found() if callable(found) else found
        return document

    @property
    def has_loader_states(self) -> bool:
        """Whether its loaders had states."""
        return bool(self.data_document(0).get("loaders"))

    def random_states(self, data_rank: int, when: str) -> dict[str, Tensor]:
        """The states of the generators of the rank that has read the data: hooks draw the same on all its ranks."""
        prefix = f"random/{data_rank * self.topology.replica_size}/{when}/"
        return {name.removeprefix(prefix): self.read(name) for name in self.tensors if name.startswith(prefix)}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Read a region of a tensor, all of it if None."""
        return StoredTensor.around(self.tensors[name]).read(region)


def resume_state(run: Run, choice: "StepChoice | None") -> ResumeState:
    """Collect what this rank adds to a checkpoint of a run of `fit`. Called by all ranks; no rank waits for another."""
    trainer, rank = run.trainer, run.rank
    document = {
        "seed": run.seed,
        "samples": vars(_samples(run)),
        "layout": _layout(run),
        "metrics": loops.metrics(trainer),
        "runs_once": choice is not None and choice.runs_once,
    }
    states: list[Any] = []
    random: dict[str, dict[str, Tensor]] = {}
    if _reads_data(run):
        states = loader_states(trainer)
        of_loaders = {name: generator.get_state() for name, generator in generators_of_loaders(trainer).items()}
        before = random_states_before(trainer) if states else {}
        random = {"now": generator_states(run.device) | of_loaders, "before": before}
    with run.guard.off():
        accumulates = loops.num_accumulated(trainer) and not loops.was_in_batch(trainer)
        gradients = list(accumulated_gradients(run)) if accumulates else []
    tensors = [
        TensorPart.whole(f"random/{rank}/{when}/{name}", state, "state")
        for when in random
        for name, state in random[when].items()
    ]
    data = {run.data_rank: {"loaders": states, "have_more": have_more(trainer)}} if states else {}
    return ResumeState(document, data, [*tensors, *gradients])


class Resume:
    """Puts back what a checkpoint holds of its run: once the loops are restored, and again when training starts.

    Args:
        saved: None: a plain Trainer's checkpoint, or one of an earlier version.
    """

    def __init__(self, run: Run, saved: SavedRun | None) -> None:
        self._trainer = trainer = run.trainer
        self._run = run
        self._saved = saved
        # Read now: a Tuner removes its checkpoint before training starts.
        reads_data = _reads_data(run)
        document: Mapping[str, Any] = {}
        if reads_data and saved is not None:
            document = saved.data_document(run.data_rank)
        elif reads_data and run.topology.data == 1:  # a plain Trainer stores those of one process
            document = {"loaders": loops.plain_loader_states(trainer)}
        self._loader_states, self._have_more = document.get("loaders", ()), document.get("have_more", ())
        self._set_random = self._random_states(reads_data=reads_data)
        self._is_before_plateau = loops.is_before_plateau(trainer)
        self._is_after_last_batch = loops.is_after_last_batch(trainer)
        loops.correct_loops(trainer)

    def start(self, choice: "StepChoice | None") -> None:
        """Called by all ranks in `on_train_start`. `choice`: of how often steps run.

        Raises:
            HanayoError: optimizer steps would take other samples than they did.
        """
        trainer, run, saved = self._trainer, self._run, self._saved
        self._is_scheduled = loops.follow_accumulation_schedule(trainer)
        lines = list(_lines(run, saved, has_position=bool(self._loader_states)))
        if self._is_after_last_batch:
            lines.append("the checkpoint was saved before the end of an epoch: its validation and hooks are left out.")
        if saved is not None:
            if "samples" not in run.options.load_anyway:
                lines += self._keep_samples(saved)
            run.samples.largest = max(run.samples.largest, saved.samples.batch)
            run.reseed(saved.document["seed"])
            if choice is not None and choice.may_run_once:
                choice.runs_once = bool(saved.document.get("runs_once"))
            lines += self._restore_gradients(saved)
            loops.set_metrics(trainer, saved.document.get("metrics", {}))
            if self._is_before_plateau:
                loops.update_plateau_schedulers(trainer)
        loops.read_data_anew(trainer, run.attributes, self._loader_states, self._have_more, self._set_random)
        for line in lines:
            rank_zero_info(f"Resuming: {line}")

    def _random_states(self, *, reads_data: bool) -> Callable[[str], None]:
        """A function that sets the generators to their states "now" or "before". It holds no more than those."""
        saved, device, trainer, data_rank = self._saved, self._run.device, self._trainer, self._run.data_rank
        states = {} if saved is None else {when: saved.random_states(data_rank, when) for when in _WHEN}

        def set_states(when: str) -> None:
            found = states.get(when, {})
            set_generators(found, device)
            of_loaders = generators_of_loaders(trainer) if reads_data else {}
            for name in of_loaders.keys() & found.keys():
                of_loaders[name].set_state(found[name])

        return set_states

    def _keep_samples(self, saved: SavedRun) -> Iterator[str]:
        trainer, run = self._trainer, self._run
        before, now = saved.samples, _samples(run)
        moved = _scale_position(trainer, saved, now)
        if moved:
            yield moved
        if now.batch == 0:
            run.samples.expect(before, now)
            return
        scaled = accumulation(before, now)
        if scaled != trainer.accumulate_grad_batches:
            if self._is_scheduled:
                raise HanayoError(
                    f"an optimizer step took {before} samples when the checkpoint was saved, and now would take {now}. "
                    f"Scale the numbers of GradientAccumulationScheduler by {scaled / now.accumulate:g}. {WAY_OUT}"
                )
            trainer.accumulate_grad_batches = scaled
            yield (
                f"accumulate_grad_batches={now.accumulate} becomes {scaled}, so that an optimizer step still takes "
                f"{before.total} samples: {StepSamples(now.batch, now.data, scaled)}"
            )

    def _restore_gradients(self, saved: SavedRun) -> Iterator[str]:
        before, now = saved.samples.accumulate, self._trainer.accumulate_grad_batches
        if before == now and loops.num_accumulated(self._trainer):
            with self._run.guard.off():
                restore_gradients(self._run, saved)
        elif before != now and saved.has_gradients:
            yield f"accumulate_grad_batches was {before}, and is {now}: gradients since the last step are left out."


def _lines(run: Run, saved: SavedRun | None, *, has_position: bool) -> Iterator[str]:
    """What can't be as in the uninterrupted run. `has_position`: the checkpoint holds the loaders' states."""
    trainer = run.trainer
    accumulated, in_epoch = loops.num_accumulated(trainer), loops.is_in_epoch(trainer)
    has_state = bool(stateful_loaders(trainer))
    if saved is None:
        yield "the checkpoint holds no random states: shuffled data and random numbers may differ from then on."
    elif (layout := saved.layout) != _layout(run):
        yield f"the checkpoint was saved on {layout}, this is {_layout(run)}: values are added up in another order."
    if in_epoch:
        number = loops.num_batches(trainer)
        yield f"{number} batches of the epoch have been trained: metrics of the epoch are of the rest alone."
    if in_epoch and not (has_position and has_state):
        missing = "state_dict() and load_state_dict()" if not has_state else "state in the checkpoint"
        yield f"the training loader has no {missing}: the epoch is read from its start again. Save at its end."
    if has_persistent_workers(trainer):
        yield "the loader has persistent_workers: they draw other random numbers than workers that have gone on."
    if accumulated and (saved is None or not saved.has_gradients):
        yield f"the checkpoint holds no gradients of the {accumulated} batches accumulated since the last step."
    if loops.was_in_batch(trainer):
        yield "the checkpoint was saved inside a batch, which a loader with a state does not give again."


def _scale_position(trainer: "pl.Trainer", saved: SavedRun, now: StepSamples) -> str | None:
    """Count the batches of the epoch so far as if they had the present size; returns what there is to say of it.

    Raises:
        HanayoError: the epoch can't go on: each data rank has read its own samples, or no whole number of batches fits.
    """
    before = saved.samples
    if not loops.is_in_epoch(trainer) or (before.batch, before.data) == (now.batch or before.batch, now.data):
        return None
    num_batches, size = loops.num_batches(trainer), now.batch * now.data
    is_whole = size > 0 and loops.can_scale_batches(trainer, before.batch * before.data, size)
    if saved.has_loader_states or not is_whole or num_batches % before.accumulate:
        raise HanayoError(
            f"the checkpoint was saved in the middle of an epoch, after {num_batches} batches of {before.batch} "
            f"samples on {before.data} data ranks, which can't go on with {now.batch or 'other'} on {now.data}. Resume "
            f"with the same sizes, or from a checkpoint of the end of an epoch. {WAY_OUT}"
        )
    if size == before.batch * before.data:
        return None
    loops.scale_batches(trainer, before.batch * before.data, size)
    return (
        f"{num_batches} batches of {before.batch} samples on {before.data} data ranks count as "
        f"{loops.num_batches(trainer)} of {now.batch} on {now.data}. A sampler that shuffles has another order "
        f"on another number of data ranks: in this epoch some samples may come twice, and others not at all."
    )


def _samples(run: Run) -> StepSamples:
    """What an optimizer step takes; the batch is known from the loader, or from batches that were read."""
    size = batch_size(run.trainer) or run.samples.largest
    return StepSamples(size, run.topology.data, run.trainer.accumulate_grad_batches)


def _layout(run: Run) -> dict[str, Any]:
    topology, num_microbatches = run.topology, run.pipeline.layout.num_microbatches
    sizes = {"data": topology.data, "pipe": topology.pipe, "cube": list(topology.cube)}
    return {**sizes, "num_microbatches": num_microbatches}


def _reads_data(run: Run) -> bool:
    """Whether the rank is the one of its data rank that reads the loader."""
    return run.rank % run.topology.replica_size == 0


def with_resume(part: RankPart, state: ResumeState) -> RankPart:
    """What this rank writes into a folder, with what a resume needs; not the document of the run.

    Raises:
        UnsupportedError: a loader's state can't be stored without pickle.
    """
    tensors, texts = data_parts(state.data)
    return replace(part, tensors=[*part.tensors, *state.tensors, *tensors], texts={**part.texts, **texts})


def gathered(state: ResumeState, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """The entry of the file, on rank 0.

    Args:
        state: of this rank.
        gather: gives every rank's value on rank 0. Called by all ranks.
    """
    own = [replace(part, tensor=part.tensor.detach().cpu()) for part in state.tensors]
    ranks = gather((state.data, own))
    wholes: dict[str, Tensor] = {}
    for part in (part for _, parts in ranks for part in parts):
        whole = wholes.setdefault(part.name, torch.zeros(part.shape, dtype=part.tensor.dtype))
        indices = [np.concatenate([np.arange(0), *(np.arange(*run) for run in runs)]) for runs in part.region.runs]
        whole[tuple(map(torch.from_numpy, np.ix_(*indices))) if indices else ...] = part.tensor
    return {"run": dict(state.document), "data": dict(ChainMap(*(data for data, _ in ranks))), "tensors": wholes}


def saved_run(checkpoint: Mapping[str, Any]) -> SavedRun | None:
    """What the dictionary of a checkpoint says of the run; None if it says nothing."""
    found = checkpoint.get(KEY)
    return None if found is None else SavedRun(found["run"], found["data"], found["tensors"])
