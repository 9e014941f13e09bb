"""The user's step on pipeline rank 0: one suspended call of it for each micro-batch under way."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.bridge import Recorder
from lightning_hanayo.runtime.packet import Packet
from lightning_hanayo.runtime.suspension import Step, Steps

StepFunction = Callable[[int], Any]
"""Runs the user's step on the micro-batch of that index, and returns what it returns."""


class UserStep:
    """Opens a micro-batch's step (up to the stack), and closes it (from the stack's output on).

    Args:
        blocks: the whole stack; `num_local` of them run in stage 0.
        name: the stack's qualified name, for errors.
        enter: called with the micro-batch's index whenever its user code is about to run.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], num_local: int, name: str, enter: Callable[[int], None] = lambda _: None
    ) -> None:
        self._blocks = blocks
        self._num_local = num_local
        self._name = name
        self._enter = enter
        self._steps = Steps()
        self._under_way: dict[int, tuple[Step, int]] = {}
        self._function: StepFunction | None = None

    def begin(self, function: StepFunction) -> None:
        """Start a batch whose micro-batches run `function`."""
        self._function = function

    def run(self, microbatch: int) -> Any:
        """Run the whole step straight through, where the stack lies as one stage; return what it returns."""
        assert self._function is not None
        self._enter(microbatch)
        return self._function(microbatch)

    def open(self, microbatch: int) -> Packet:
        """Run the step until it suspends at the last block, and return the cargo.

        Raises:
            UnsupportedError: the step ended without passing the stack.
        """
        function = self._function
        assert function is not None
        self._enter(microbatch)
        recorder = Recorder(self._blocks, self._num_local, self._name)
        step = self._steps.begin(lambda: _whole(function, microbatch), recorder)
        if step.done:
            self._steps.release(step)
            raise UnsupportedError(
                f"the step ended after {recorder.num_visited} of the {len(self._blocks)} blocks of {self._name}; "
                f"a pipeline plays one whole pass through the stack for each micro-batch."
            )
        self._under_way[microbatch] = (step, recorder.mark)
        return recorder.packet

    def close(self, microbatch: int, output: Any) -> tuple[Any, int]:
        """Resume the step with the stack's output; return what it returns, and autograd's clock at its suspension."""
        step, mark = self._under_way.pop(microbatch)
        self._enter(microbatch)
        step.resume(output)
        self._steps.release(step)
        result, step.result = step.result, None
        return result, mark

    def stop(self) -> None:
        """Unwind what is suspended and end the threads."""
        self._under_way.clear()
        self._steps.close()


def _whole(function: StepFunction, microbatch: int) -> Any:
    """Run the user's step; a value that hangs on another rank's placeholders is refused by name."""
    try:
        return function(microbatch)
    except NotImplementedError as error:
        if "meta tensor" not in str(error):
            raise
        raise without_values("the step") from error


def without_values(what: str) -> UnsupportedError:
    """The error for `what`, which hangs on placeholders."""
    return UnsupportedError(
        f"{what} uses parameters of blocks that lie on other pipeline ranks (a penalty over self.parameters()?), and "
        f"this rank has no values for them. Use the optimizer's weight_decay, or compute it inside the block."
    )
