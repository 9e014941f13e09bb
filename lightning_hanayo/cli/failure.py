"""A failure that the user can mend: one readable message, once in the whole world of processes, and exit code 2."""

import os
import sys
from collections.abc import Mapping

EXIT_CODE = 2


def fail(message: str, *, first: bool = False) -> int:
    """Show `message` on the error stream and return the exit code.

    What is known before launch is found by all processes, so that global rank 0 says it alone; an error that shows
    later is said by the rank that met it `first`.
    """
    if first or is_rank_zero(os.environ):
        print(f"hanayo: error: {message}", file=sys.stderr, flush=True)
    return EXIT_CODE


def debugging() -> bool:
    """Whether `HANAYO_DEBUG` is set, which shows where a failure came from: the whole traceback."""
    return bool(os.environ.get("HANAYO_DEBUG"))


def is_rank_zero(environment: Mapping[str, str]) -> bool:
    """Whether this process is global rank 0, by the variables that torchrun, SLURM or Lightning's launcher set.

    Example:
        >>> is_rank_zero({}), is_rank_zero({"NODE_RANK": "1", "LOCAL_RANK": "0"})
        (True, False)
    """
    for world in ("RANK", "SLURM_PROCID"):
        if world in environment:
            return environment[world] == "0"
    return all(environment.get(name, "0") == "0" for name in ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK"))
