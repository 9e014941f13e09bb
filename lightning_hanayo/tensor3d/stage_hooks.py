"""The surroundings: what a stage's 3-D layers are told before each of its runs."""

from lightning_hanayo.tensor3d.stage_context import StageContext


class TensorParallelHooks:
    """One stage's.

    Args:
        setting: what its layers share.
    """

    def __init__(self, setting: StageContext) -> None:
        self._setting = setting

    def begin_batch(self) -> None:
        """See `runtime.gate.Surroundings`."""
        self._setting.late.forget()
        self._setting.order.forget()

    def before_forward(self, sequence_length: int) -> None:
        """See `runtime.gate.Surroundings`."""
        self._setting.length = sequence_length or None
        self._setting.order.begin()

    def before_backward(self, sequence_length: int) -> None:
        """See `runtime.gate.Surroundings`: a layer that is computed again finds what it found before."""
        self._setting.length = sequence_length or None
        self._setting.order.begin(recomputes=True)
