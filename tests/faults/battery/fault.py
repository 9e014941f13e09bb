"""Injects one fault into a training script: what happens (`Kind`), where (`site`), and on which rank."""

import ctypes
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Kind = Literal["kill", "stop", "sigterm", "sigint", "exception", "hang", "gil", "nan", "none"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CAUSE = "the planned fault"
STEP = 4
"""the number of optimizer steps before a fault within the training"""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "sigterm": signal.SIGTERM, "sigint": signal.SIGINT}


@dataclass
class Fault:
    """One fault. Its time and step are written to FAULT_FILE when it happens, which is once."""

    kind: Kind
    site: str
    rank: int
    step: int = 0
    happened: bool = field(default=False, init=False)

    def at(self, site: str, after: int = 0) -> bool:
        """Fail here if this is the place and at least `after` steps were done; return whether a value is to be NaN."""
        own = int(os.environ.get("LOCAL_RANK", "0")) == self.rank and site == self.site
        if self.happened or not own or self.step < after:
            return False
        self.happened = True
        with open(os.environ["FAULT_FILE"], "w") as file:
            file.write(str(time.time()))
        self._happen()
        return self.kind == "nan"

    def _happen(self) -> None:
        if self.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.kind])
        elif self.kind == "exception":
            raise RuntimeError(CAUSE)
        elif self.kind == "hang":
            time.sleep(3600)
        elif self.kind == "gil":
            hold_interpreter()


def hold_interpreter() -> None:
    """Wait forever in C without releasing Python's lock, also if a signal comes: lock a mutex twice."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


class InBlock(torch.autograd.Function):
    """The identity, which may fail in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return spoilt(x.clone(), fault.at("forward", STEP))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return spoilt(gradient.clone(), ctx.fault.at("backward", STEP)), None


def spoilt(x: Tensor, spoil: bool) -> Tensor:
    """The tensor, with NaN if it is to be spoilt."""
    return x * torch.nan if spoil else x
