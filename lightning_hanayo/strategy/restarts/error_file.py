"""Tells torchrun why a rank has failed: its agent shows the text of a small file instead of "<N/A>".

Root Cause (first observed failure):
  rank      : 1 (local_rank: 1)
  traceback : RuntimeError: the loss exploded
"""

import json
import os
import time
import traceback
from collections.abc import Mapping

from lightning_hanayo.errors import HanayoError, PeerFailed, with_notes

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_error_file(error: BaseException, environment: Mapping[str, str] = os.environ) -> None:
    """Write why this rank fails to the file that torchrun's agent reads, if there is an agent.

    A rank that ends because of another one names that one's cause: torchrun shows what it has seen first.
    """
    path = environment.get(_VARIABLE, os.devnull)
    if path == os.devnull or not os.path.isdir(os.path.dirname(path)):
        return
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": _shown(error), "timestamp": str(int(time.time()))},
    }
    new = f"{path}.new"
    try:
        with open(new, "w") as file:
            json.dump({"message": message}, file)
        os.replace(new, path)  # the agent can't go on from a file that isn't whole
    except OSError:
        return  # the error itself is shown anyway


def _shown(error: BaseException) -> str:
    if isinstance(error, PeerFailed):
        return f"ended because another rank failed first: {error}"
    if isinstance(error, HanayoError):
        return f"{type(error).__name__}: {with_notes(error)}"
    return "".join(traceback.format_exception(error))
