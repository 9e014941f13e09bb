"""Recognises errors that only say that another rank is gone: they are a consequence, and its cause is elsewhere."""

import re
from collections.abc import Iterator

import torch.distributed as dist

_GLOO = re.compile(r"gloo/\S+\] ?(?P<what>.+)")
"""its errors begin with the file and line that they come from"""
_NCCL = re.compile(
    r"ncclRemoteError|remote process exited|communicator was aborted|connection (closed|reset|refused)|broken pipe"
    r"|timed? ?out|Watchdog caught collective operation",
    re.IGNORECASE,
)
_LONGEST = 200


def is_lost_connection(error: BaseException) -> bool:
    """Whether the error, or one that it was made of, says no more than that another rank doesn't answer."""
    return any(_says_so(one) for one in _with_causes(error))


def what_was_lost(error: BaseException) -> str:
    """What such an error says, in one line: without the places in C++ files."""
    found = next((one for one in _with_causes(error) if _says_so(one)), error)
    line = str(found).strip().partition("\n")[0]
    gloo = _GLOO.search(line)
    return (gloo["what"] if gloo else line)[:_LONGEST].strip().rstrip(".")


def _says_so(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):
        return _NCCL.search(str(error)) is not None
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
