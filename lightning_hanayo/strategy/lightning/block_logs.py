"""Carries calls of `self.log` inside blocks to the rank where the step runs, which logs them for its micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.capture.carried import BlockRun

Call = list[Any]
"""hook, name, value, and the options of `self.log` as a dictionary"""
_NOT_SENT = ("sync_dist_fn", "sync_dist_group")


class BlockLogs:
    """Carries log calls, on one rank; in some cubes it `rejects` them, as blocks compute with parts of values there."""

    def __init__(self, module: Any, *, rejects: bool = False) -> None:
        self._module = module
        self._rejects = rejects

    def begin_batch(self) -> None:
        """Do nothing."""

    enter = undo = begin_recording = begin_batch

    def leave(self, earlier: Any, *, begins_pass: bool = True) -> tuple[None, None]:
        """Leave nothing: blocks in the step's thread have logged like the step itself."""
        return None, None

    @contextmanager
    def running(self, tree: list[Call] | None, run: BlockRun) -> Iterator[list[list[Call] | None]]:
        """Keep what the blocks log."""
        result = [tree]
        results: Any = self._module.trainer._results
        if results is None:  # predict logs nothing
            yield result
            return
        calls: list[Call] = []
        results.log = lambda hook, name, value, **options: calls.append(self._call(hook, name, value, options))
        try:
            yield result
        finally:
            del results.log
        if calls:
            result[0] = [*(tree or []), *calls]

    def deliver(self, tree: list[Call] | None, left: Any) -> None:
        """Log what blocks elsewhere have logged."""
        if tree:
            reduce = self._module.trainer.strategy.reduce
            results: Any = self._module.trainer._results
            for hook, name, value, options in tree:
                results.log(hook, name, value, sync_dist_fn=reduce, sync_dist_group=None, **options)

    def end(self, delivered: Any) -> None:
        """Do nothing."""

    def _call(self, hook: str, name: str, value: Any, options: dict[str, Any]) -> Call:
        """The call, as far as it can be sent.

        Raises:
            UnsupportedError: it logs a metric object, or has a function as `reduce_fx`; or this is a cube.
        """
        way_out = f"Store the value in the block (self.value = {name}), and log it in the step."
        if self._rejects:
            raise UnsupportedError(
                f"a block calls self.log({name!r}), but in this cube blocks work on other parts of the samples or "
                f"features than the step. Log it in the step."
            )
        if not isinstance(value, Tensor) or not isinstance(options.get("reduce_fx"), str):
            raise UnsupportedError(
                f"a block calls self.log({name!r}) with a {type(value).__name__} and reduce_fx="
                f"{options.get('reduce_fx')!r}; only numbers, with the name of a reduction, can be sent to the rank "
                f"that logs. {way_out}"
            )
        return [hook, name, value.detach(), {key: own for key, own in options.items() if key not in _NOT_SENT}]
