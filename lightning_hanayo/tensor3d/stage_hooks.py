"""The surroundings: what a stage's 3-D layers are told before each of its runs."""

from lightning_hanayo.tensor3d.stage_context import StageContext


class TensorParallelHooks:
    """One stage's.

    Args:
        setting: what its layers share.
    """

    def __init__(self, setting: StageContext) -> None:
        self._setting = setting
        self._lengths: dict[int, int] = {}

    def begin_batch(self) -> None:
        """See `runtime.gate.Surroundings`."""
        self._lengths.clear()
        self._setting.late.forget()
        self._setting.order.forget()

    def before_forward(self, microbatch: int, note: int) -> None:
        """See `runtime.gate.Surroundings`: the note is the length of the sequences."""
        self._lengths[microbatch] = note
        self._setting.length = note or None
        self._setting.order.begin()

    def before_backward(self, microbatch: int) -> None:
        """See `runtime.gate.Surroundings`: a layer that is computed again finds what it found before."""
        self._setting.length = self._lengths.get(microbatch) or None
        self._setting.order.begin(recomputes=True)
