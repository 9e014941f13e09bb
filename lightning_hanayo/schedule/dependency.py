"""Dependency: who waits for whom. The one rule that builders, passes, validation and simulation share.

    F(s-1) -> F(s) -> F(s+1)            within one micro-batch, down the stages
                |
    B(s-1) <- B(s) <- B(s+1)            and back; B may be cut into I (hands on) and W (waits for its own I)

Between two ranks a message stands in between: F(s-1) -> SEND_F(s-1) -> RECV_F(s) -> F(s).

Where the model is there several times (chimera), its copies' stages are numbered one chain after another, and nothing
crosses from one chain into the next; only the gradients of a stage and its twins are summed together:

    chain 0    F(0) -> F(1) -> ... F(P-1)       B(P-1) ...      REDUCE_GRAD(s) waits for s and s + P
    chain 1    F(P) -> ... F(2P-1)
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.table import Schedule

Lists = Sequence[Sequence[Action]]
"""One list of actions per pipeline rank."""


def waits_for(
    action: Action, num_stages: int, num_microbatches: int = 1, num_chains: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """All of these must be done before `action`; of each inner tuple, the first that its table holds.

    So a stage's input counts as arrived with its receive where the table has one, else with the previous stage's
    forward. `num_microbatches` matters for `REDUCE_GRAD` only, which waits for every weight gradient of its stage and
    its twins. `num_stages` counts the stages of all chains.

    Example:
        >>> [[str(a) for a in one_of] for one_of in waits_for(Action(1, Kind.B, 0), num_stages=3)]
        [['1F0'], ['1RECV_B0', '2B0', '2I0']]
    """
    stage, microbatch, chain_length = action.stage, action.microbatch, num_stages // num_chains
    match action.kind:
        case Kind.F | Kind.RECV_F | Kind.RECV_B:
            return _inputs(action, chain_length)
        case Kind.B | Kind.I:
            return ((Action(stage, Kind.F, microbatch),), *_inputs(action, chain_length))
        case Kind.W:
            return ((Action(stage, Kind.I, microbatch),),)
        case Kind.SEND_F:
            return ((Action(stage, Kind.F, microbatch),),)
        case Kind.SEND_B:
            return (_input_gradients(stage, microbatch),)
        case Kind.REDUCE_GRAD:
            twins = range(stage % chain_length, num_stages, chain_length)
            return tuple(
                tuple(Action(twin, kind, m) for twin in twins for kind in (Kind.B, Kind.W))
                for m in range(num_microbatches)
            )


def source_stage(action: Action, chain_length: int) -> int | None:
    """The stage that makes what `action` computes on or receives. None: no other stage does.

    `chain_length` is the number of stages of one copy of the model.

    Example:
        >>> [source_stage(Action.parse(cell), chain_length=4) for cell in ("1F0", "1B0", "1RECV_B0", "1SEND_F0", "0F0")]
        [0, 2, 2, None, None]
    """
    if action.kind in (Kind.F, Kind.RECV_F):
        return action.stage - 1 if action.stage % chain_length else None
    if action.kind in (Kind.B, Kind.I, Kind.RECV_B):
        return action.stage + 1 if (action.stage + 1) % chain_length else None
    return None


def target_stage(action: Action, chain_length: int) -> int | None:
    """The stage that works on what `action` makes or sends. None: no other stage does.

    Example:
        >>> [target_stage(Action.parse(cell), chain_length=4) for cell in ("1F0", "1B0", "1SEND_B0", "1W0", "3F0")]
        [2, 0, 0, None, None]
    """
    if action.kind in (Kind.F, Kind.SEND_F):
        return action.stage + 1 if (action.stage + 1) % chain_length else None
    if action.kind in (Kind.B, Kind.I, Kind.SEND_B):
        return action.stage - 1 if action.stage % chain_length else None
    return None


def _inputs(action: Action, chain_length: int) -> tuple[tuple[Action, ...], ...]:
    """What brings another stage's output: the receive, if the table holds one, else what computes it."""
    stage, microbatch, source = action.stage, action.microbatch, source_stage(action, chain_length)
    if source is None:
        return ()
    match action.kind:
        case Kind.F:
            return ((Action(stage, Kind.RECV_F, microbatch), Action(source, Kind.F, microbatch)),)
        case Kind.RECV_F:
            return ((Action(source, Kind.SEND_F, microbatch),),)
        case Kind.RECV_B:
            return ((Action(source, Kind.SEND_B, microbatch),),)
        case _:
            return ((Action(stage, Kind.RECV_B, microbatch), *_input_gradients(source, microbatch)),)


def _input_gradients(stage: int, microbatch: int | None) -> tuple[Action, ...]:
    return (Action(stage, Kind.B, microbatch), Action(stage, Kind.I, microbatch))


Waits = Mapping[Action, tuple[Action, ...]]
"""For each action of a table, the actions of the same table that it waits for."""


def waits_in(
    lists: Lists, num_stages: int, num_microbatches: int, num_chains: int = 1
) -> dict[Action, tuple[Action, ...]]:
    """The rule applied to one table. What the table doesn't hold isn't waited for (validation reports it)."""
    present = {action for row in lists for action in row}
    return {
        action: tuple(
            held
            for one_of in waits_for(action, num_stages, num_microbatches, num_chains)
            if (held := next((other for other in one_of if other in present), None)) is not None
        )
        for action in present
    }


def producers(schedule: Schedule) -> dict[Action, Action]:
    """For each compute action that works on another stage's output: the action that computes this output."""
    waits = waits_in(schedule.actions, schedule.num_stages, schedule.num_microbatches, schedule.num_chains)
    return {action: other for action, others in waits.items() for other in others if other.stage != action.stage}


def play(lists: Lists, waits: Waits) -> Iterator[Action]:
    """The actions in an order in which they can be done, each rank in its own list's order; ends early where all wait.

    Compute holds its rank until what it waits for is done. Communication doesn't: it is posted when reached and is done
    once what it waits for is. Linear in the number of actions: a rank that waits is woken by the action it waits for.
    """
    done: set[Action] = set()
    place = [0] * len(lists)
    wakes_rank: dict[Action, list[int]] = defaultdict(list)
    wakes_posted: dict[Action, list[Action]] = defaultdict(list)
    awake = list(range(len(lists)))[::-1]
    while awake:
        rank = awake.pop()
        while place[rank] < len(lists[rank]):
            action = lists[rank][place[rank]]
            missing = next((other for other in waits[action] if other not in done), None)
            if missing is not None and action.kind.is_compute:
                wakes_rank[missing].append(rank)
                break
            place[rank] += 1
            finished = [action] if missing is None else []
            if missing is not None:
                wakes_posted[missing].append(action)
            while finished:
                last = finished.pop()
                done.add(last)
                yield last
                awake.extend(wakes_rank.pop(last, ()))
                for posted in wakes_posted.pop(last, ()):
                    missing = next((other for other in waits[posted] if other not in done), None)
                    if missing is None:
                        finished.append(posted)
                    else:
                        wakes_posted[missing].append(posted)
