"""The user's step on pipeline rank 0: one suspended call of it for each micro-batch under way."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.batch import Batch, StepFunction
from lightning_hanayo.runtime.capture.forward_patch import BlockTracer
from lightning_hanayo.runtime.capture.suspended_call import SuspendedCall, SuspendedCalls
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.random_streams import RandomStreams


class UserStep:
    """Opens a micro-batch's step (up to the stack), and closes it (from the stack's output on).

    Args:
        blocks: the whole stack; `num_local` of them run where they are called.
        name: the stack's qualified name, for errors.
        streams: the random streams of steps and blocks; None: torch's own generators are left as they are.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], num_local: int, name: str, streams: RandomStreams | None = None
    ) -> None:
        self._blocks = blocks
        self._num_local = num_local
        self._name = name
        self._streams = streams
        self._steps = SuspendedCalls()
        self._under_way: dict[int, tuple[SuspendedCall, BlockTracer]] = {}
        self._rehearsals: dict[int, tuple[SuspendedCall, BlockTracer]] = {}

    def run(self, batch: Batch, microbatch: int) -> Any:
        """Run the whole step straight through, where the stack lies as one stage; return what it returns."""
        assert batch.step is not None
        batch.on_user_code(microbatch)
        self._begin_code(microbatch)
        return batch.step(microbatch)

    def open(self, batch: Batch, microbatch: int) -> Message:
        """Run the step until it suspends at the last block, and return the cargo.

        Raises:
            UnsupportedError: the step ended without passing the stack.
        """
        assert batch.step is not None
        batch.on_user_code(microbatch)
        self._under_way[microbatch] = self._begin(batch.step, microbatch)
        return self._under_way[microbatch][1].packet

    def go_on(self, batch: Batch, microbatch: int, output: Any) -> Message:
        """Where no block runs in the step: resume it with the first block's output, to its suspension at the last one.

        Returns:
            The calls of the blocks behind the first one.
        """
        batch.on_user_code(microbatch)
        return self._go_on(self._under_way, microbatch, output)

    def rehearse(self, batch: Batch, microbatch: int) -> Message:
        """As `open`, of the rehearsed function: what it does counts for nothing, and it is never closed."""
        assert batch.dry_run_step is not None
        batch.on_user_code(None)
        self._rehearsals[microbatch] = self._begin(batch.dry_run_step, microbatch)
        return self._rehearsals[microbatch][1].packet

    def rehearse_on(self, batch: Batch, microbatch: int, output: Any) -> Message:
        """As `go_on`; then the rehearsal is over."""
        batch.on_user_code(None)
        packet = self._go_on(self._rehearsals, microbatch, output)
        step, _ = self._rehearsals.pop(microbatch)
        step.abandon()
        self._steps.release(step)
        return packet

    def _begin_code(self, microbatch: int) -> None:
        if self._streams is not None:
            self._streams.begin_code(microbatch)

    def _begin(self, function: StepFunction, microbatch: int) -> tuple[SuspendedCall, BlockTracer]:
        recorder = BlockTracer(self._blocks, self._num_local, self._name)
        self._begin_code(microbatch)
        step = self._steps.begin(lambda: _whole(function, microbatch), recorder)
        self._check(step, recorder)
        return step, recorder

    def _go_on(self, under_way: dict[int, tuple[SuspendedCall, BlockTracer]], microbatch: int, output: Any) -> Message:
        step, recorder = under_way[microbatch]
        step.resume(output)
        self._check(step, recorder)
        return recorder.packet

    def _check(self, step: SuspendedCall, recorder: BlockTracer) -> None:
        if step.done:
            self._steps.release(step)
            raise UnsupportedError(
                f"the step ended after {recorder.num_visited} of the {len(self._blocks)} blocks of {self._name}; "
                f"a pipeline plays one whole pass through the stack for each micro-batch."
            )

    def close(self, batch: Batch, microbatch: int, output: Any) -> tuple[Any, int]:
        """Resume the step with the stack's output; return what it returns, and autograd's clock at its suspension."""
        step, recorder = self._under_way.pop(microbatch)
        batch.on_user_code(microbatch)
        step.resume(output)
        self._steps.release(step)
        result, step.result = step.result, None
        return result, recorder.mark

    def stop(self) -> None:
        """Unwind what is suspended and end the threads."""
        self._under_way.clear()
        self._rehearsals.clear()
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
