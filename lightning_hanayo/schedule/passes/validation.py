"""Validation: is a table a schedule? Every action once, on its stage's rank, and no ring of ranks that wait."""

from collections import defaultdict
from typing import NoReturn

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.dependency import play, waits_in
from lightning_hanayo.schedule.search.evaluator import Evaluator
from lightning_hanayo.schedule.table import Schedule
from lightning_hanayo.schedule.text.table_text import grid

_BACKWARD = ({Kind.B}, {Kind.I, Kind.W})


def validate(schedule: Schedule) -> None:
    """Accept a schedule that can run to its end; a table with no backward at all counts as forward only.

    Linear in the number of actions.

    Raises:
        HanayoError: it can't; the message says why, draws the table and marks the culprit.
    """
    _check_shape(schedule)
    _check_cells(schedule)
    _check_coverage(schedule)
    _check_order(schedule)


def _check_shape(schedule: Schedule) -> None:
    if not schedule.actions or not schedule.stage_ranks:
        raise HanayoError(
            f"schedule {schedule.name!r} has {schedule.num_ranks} ranks and {schedule.num_stages} stages; "
            "expected at least one of each"
        )
    if schedule.num_microbatches < 1:
        raise HanayoError(
            f"schedule {schedule.name!r}: num_microbatches={schedule.num_microbatches}, expected at least 1"
        )
    for stage, rank in enumerate(schedule.stage_ranks):
        if rank not in range(schedule.num_ranks):
            raise HanayoError(
                f"schedule {schedule.name!r}: stage {stage} lies on rank {rank}, but there are rows for "
                f"{schedule.num_ranks} ranks (0 to {schedule.num_ranks - 1})"
            )
    half = schedule.chain_length
    twins = tuple((stage + half) % schedule.num_stages for stage in range(schedule.num_stages))
    if schedule.replica_of not in ((), twins):
        raise HanayoError(
            f"schedule {schedule.name!r}: replica_of={schedule.replica_of}, expected () or, for {schedule.num_stages} "
            f"stages in two equal chains, {twins}"
        )
    if schedule.replica_of and schedule.loss_stage:
        raise HanayoError(f"schedule {schedule.name!r}: two chains end in two losses; one loss stage can't hold them")


def _check_cells(schedule: Schedule) -> None:
    seen: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            here = (rank, place)
            if not action.kind.is_compute:
                _refuse(schedule, here, f"{action} is communication; a schedule holds compute only (F, B, I, W)")
            if action.stage not in range(schedule.num_stages):
                _refuse(
                    schedule,
                    here,
                    f"{action}: there is no stage {action.stage}, stages are {_span(schedule.num_stages)}",
                )
            if action.microbatch not in range(schedule.num_microbatches):
                which = f"micro-batches are {_span(schedule.num_microbatches)}"
                _refuse(schedule, here, f"{action}: there is no micro-batch {action.microbatch}, {which}")
            owner = schedule.stage_ranks[action.stage]
            if owner != rank:
                _refuse(
                    schedule, here, f"ranks {owner} and {rank} both claim stage {action.stage}; one rank holds a stage"
                )
            if action in seen:
                _refuse(
                    schedule, here, f"{action} stands twice on rank {rank}, at places {seen[action][1]} and {place}"
                )
            seen[action] = here
    empty = [rank for rank in range(schedule.num_ranks) if not schedule.stages_of(rank)]
    if empty:
        raise HanayoError(f"schedule {schedule.name!r}: rank {empty[0]} holds no stage; every rank needs at least one")


def _check_coverage(schedule: Schedule) -> None:
    kinds: dict[tuple[int, int | None], dict[Kind, tuple[int, int]]] = defaultdict(dict)
    length = schedule.chain_length
    first: dict[int | None, Action] = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            kinds[action.stage, action.microbatch][action.kind] = (rank, place)
            begun = first.setdefault(action.microbatch, action)
            if begun.stage // length != action.stage // length:
                _refuse(schedule, (rank, place), _strays(action, begun, schedule))
    trains = any(kind is not Kind.F for cell in kinds.values() for kind in cell)
    for stage, rank in enumerate(schedule.stage_ranks):
        for m in range(schedule.num_microbatches):
            if m in first and first[m].stage // length != stage // length:
                continue
            found = kinds[stage, m]
            here = next(iter(found.values()), (rank, len(schedule.actions[rank])))
            if Kind.F not in found:
                _refuse(schedule, here, f"stage {stage} has no forward of micro-batch {m} (expected {stage}F{m})")
            backward = found.keys() - {Kind.F}
            if trains and backward not in _BACKWARD:
                got = f"got {' and '.join(sorted(backward)) or 'none'}"
                wanted = f"expected {stage}B{m}, or {stage}I{m} and {stage}W{m}"
                _refuse(schedule, here, f"stage {stage} has no whole backward of micro-batch {m}: {wanted}, {got}")


def _strays(action: Action, begun: Action, schedule: Schedule) -> str:
    length = schedule.chain_length
    return (
        f"{action}: micro-batch {action.microbatch} visits stage {begun.stage} of the other chain too (at {begun}); "
        f"stages {_span(length)} are one copy of the model, {length} to {2 * length - 1} the other, and a micro-batch "
        "visits one of them"
    )


def _check_order(schedule: Schedule) -> None:
    compiled = Evaluator(schedule, CostModel())
    if compiled.play(compiled.rows(schedule.actions)) is not None:
        return
    waits = waits_in(schedule.actions, schedule.num_stages, schedule.num_microbatches, schedule.num_chains)
    done = set(play(schedule.actions, waits))
    heads = {
        rank: place
        for rank, row in enumerate(schedule.actions)
        if (place := next((place for place, action in enumerate(row) if action not in done), None)) is not None
    }
    if not heads:
        return
    story, culprit = _ring(schedule, waits, done, heads)
    _refuse(schedule, (culprit, heads[culprit]), f"these wait for each other and can never run: {story}")


def _ring(
    schedule: Schedule, waits: dict[Action, tuple[Action, ...]], done: set[Action], heads: dict[int, int]
) -> tuple[str, int]:
    """Who waits for whom, from a stuck rank round to itself, and that rank."""
    steps: dict[int, str] = {}
    rank = next(iter(heads))
    while rank not in steps:
        action = schedule.actions[rank][heads[rank]]
        missing = next(other for other in waits[action] if other not in done)
        owner = schedule.stage_ranks[missing.stage]
        behind = "itself" if owner == rank else schedule.actions[owner][heads[owner]]
        where = f"on rank {owner}, " if owner != rank else ""
        steps[rank] = f"rank {rank} at {action} waits for {missing}, which stands {where}behind {behind}"
        rank = owner
    ranks = list(steps)
    return "; ".join(steps[one] for one in ranks[ranks.index(rank) :]), rank


def _refuse(schedule: Schedule, here: tuple[int, int], why: str) -> NoReturn:
    drawn = grid(schedule.actions, here)
    error = HanayoError(f"schedule {schedule.name!r}, rank {here[0]}, place {here[1]}: {why}\n{drawn}")
    error.cell = here
    raise error


def _span(count: int) -> str:
    return f"0 to {count - 1}"
