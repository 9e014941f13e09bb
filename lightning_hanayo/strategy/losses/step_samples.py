"""How many samples an optimizer step takes: the same before and after a resume, on any number of data ranks.

                    batch   data ranks   accumulated     samples per step
saved                 8         4            1                 32
resumed               8         2            1  ->  2          32           scaled: nobody has changed it
resumed              16         2            1                 32           as the user wants it
resumed               8         2            3                 48           refused
"""

import warnings
from dataclasses import dataclass

from lightning_hanayo.errors import HanayoError

WAY_OUT = "HanayoStrategy(load_anyway=('samples',)) goes on with other steps."


@dataclass(frozen=True)
class StepSamples:
    """What an optimizer step takes."""

    batch: int
    """the samples of a data rank's batch, of the largest one; 0: not known"""
    data: int
    """the number of data ranks"""
    accumulate: int
    """the number of batches that are accumulated"""

    @property
    def total(self) -> int:
        """Of one step."""
        return self.batch * self.data * self.accumulate

    def __str__(self) -> str:
        return f"{self.batch} x {self.data} data ranks x {self.accumulate} accumulated batches = {self.total}"


def accumulation(saved: StepSamples, now: StepSamples) -> int:
    """Return how many batches to accumulate, so that a step takes as many samples as it did.

    Raises:
        HanayoError: there is no such number, or the user has chosen another one.
    """
    if not saved.total:
        _warn_if_changed(saved, now)
    if not saved.total or not now.total or saved.total == now.total:
        return now.accumulate
    scaled, rest = divmod(saved.total, now.batch * now.data)
    if now.accumulate == saved.accumulate and not rest:
        return scaled
    raise _refusal(saved, now)


def _refusal(saved: StepSamples, now: StepSamples) -> HanayoError:
    scaled, rest = divmod(saved.total, now.batch * now.data)
    choice = "another batch size or number of data ranks" if rest else f"accumulate_grad_batches={scaled}"
    return HanayoError(
        f"an optimizer step took {saved} samples when the checkpoint was saved; now it would take {now}. Choose "
        f"{choice}. {WAY_OUT}"
    )


def _warn_if_changed(saved: StepSamples, now: StepSamples) -> None:
    if (saved.data, saved.accumulate) != (now.data, now.accumulate):
        warnings.warn(
            f"an optimizer step may take other numbers of samples, which can't be counted: {saved.data} data ranks x "
            f"{saved.accumulate} accumulated batches then, {now.data} x {now.accumulate} now.",
            stacklevel=2,
        )


class SampleCount:
    """Counts the samples of the batches that this rank reads.

    A resume that changes data ranks or accumulation expects a number, where the loader doesn't say its batch size.
    """

    def __init__(self) -> None:
        self.largest = 0
        self._expected: tuple[StepSamples, StepSamples] | None = None

    def expect(self, saved: StepSamples, now: StepSamples) -> None:
        """Check the first batch: a step shall take as many samples as it did. `now.batch` isn't known."""
        self.largest = saved.batch
        if not saved.batch:
            _warn_if_changed(saved, now)
        elif (saved.data, saved.accumulate) != (now.data, now.accumulate):
            self._expected = saved, now

    def note(self, batch: int) -> None:
        """Called with the size of each training batch, before it runs; 0 if it can't be counted.

        Raises:
            HanayoError: it is the first one after a resume, and steps would take other numbers of samples.
        """
        self.largest = max(self.largest, batch)
        expected, self._expected = self._expected, None
        if expected is not None:
            saved, now = expected
            if not batch:
                _warn_if_changed(saved, now)
                return
            found = StepSamples(batch, now.data, now.accumulate)
            if found.total != saved.total:
                raise _refusal(saved, found)
