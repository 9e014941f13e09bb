"""What a training batch computes, in FLOPs: given by the user, or three forwards of the whole model, counted once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_hanayo.strategy.lightning.inspection.flops import forward_flops

_BACKWARD = 2
"""FLOPs of a backward, in forwards: the gradients of both operands of each product"""


@dataclass(frozen=True)
class StepFlops:
    """The FLOPs of training batches; 0 where they aren't known.

    Args:
        of_batch: returns those of forward and backward of one data rank's batch.
        said: a line about where they come from, or what to do.
    """

    of_batch: Callable[[Any], float]
    said: str

    @staticmethod
    def find(module: "pl.LightningModule", given: float | None, num_samples: Callable[[Any], int]) -> "StepFlops":
        """What is given here, or as `module.flops_per_batch`, else what `example_input_array` shows.

        `num_samples` returns the samples of a batch, and of the example: FLOPs are in proportion to them.
        """
        if given is None:
            given = getattr(module, "flops_per_batch", None)
        if given is not None:
            number = float(given)
            return StepFlops(lambda _: number, f"{number:.3g} per batch of a data rank, as given")
        example = module.example_input_array
        samples = 0 if example is None else num_samples(example)
        forward = forward_flops(module) if samples else 0
        if not forward:
            return StepFlops(
                lambda _: 0.0,
                "not known, so no FLOP/s: set example_input_array of the module, whose forward must depend on shapes "
                "alone, or WaveReport(flops_per_batch=...)",
            )
        per_sample = (1 + _BACKWARD) * forward / samples
        return StepFlops(
            lambda batch: per_sample * num_samples(batch),
            f"{per_sample:.3g} per sample: 3 times a forward of example_input_array",
        )
