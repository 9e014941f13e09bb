"""The orders that torch.distributed.pipelining generates, from its own constructors."""

from types import SimpleNamespace

from lightning_hanayo.schedule import Schedule


def torch_order(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[str]]:
    """The compute actions of `torch.distributed.pipelining.schedules.<name>`, a row per rank, without its idle cells.

    Raises:
        ValueError: torch has no order for these sizes.
    """
    from torch.distributed.pipelining import schedules

    stage = {"num_stages": num_ranks * stages_per_rank, "group_size": num_ranks, "group_rank": 0, "submod": None}
    made = getattr(schedules, name)([SimpleNamespace(**stage) for _ in range(stages_per_rank)], num_microbatches)
    return [[str(action) for action in made.pipeline_order[rank] if action] for rank in range(num_ranks)]


def as_text(schedule: Schedule) -> list[list[str]]:
    """Our rows, written as torch writes its own."""
    return [[str(action) for action in row] for row in schedule.actions]
