"""What building a pipeline needs from this rank, and what is kept of a module between runs."""

from dataclasses import dataclass

import torch

from lightning_hanayo.runtime.comm.process_group import OnFailure, ProcessGroupTransport
from lightning_hanayo.runtime.comm.relay import Relay
from lightning_hanayo.runtime.random_streams import RandomStreams
from lightning_hanayo.strategy.build.cube import Cube
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.process_groups import ProcessGroups
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


@dataclass(frozen=True)
class RankContext:
    """What this rank brings to its pipeline.

    Args:
        options: of the strategy.
        groups: this rank's process groups.
        device: where the model shall be.
        relay: over the ranks of the pipeline.
        attributes: remembers what is set on the model's modules for the run.
        on_failure: called when a transfer fails.
        seed: for the values of what was built on the meta device; equal on all ranks.
        random_streams: where random numbers come from; None: from torch's own generators, unchanged.
    """

    options: Options
    groups: ProcessGroups
    device: torch.device
    relay: Relay
    attributes: TemporaryAttributes
    on_failure: OnFailure
    seed: int
    random_streams: RandomStreams | None

    def transport(self) -> ProcessGroupTransport:
        """A new transport among the ranks of this rank's pipeline."""
        return ProcessGroupTransport(
            self.groups.pipe_ranks,
            control=self.groups.control,
            channels=self.groups.channels,
            device=self.device,
            on_failure=self.on_failure,
        )


@dataclass
class PreparedModel:
    """What is kept of a module from its first run: later runs find its stages cut and its layers converted."""

    stage_blocks: list[range] | None = None
    """the blocks of each stage; None before the first run"""
    cube: Cube | None = None
    """None before the first run, and without a cube"""
