"""The expected time of an optimizer step of a layout: counted work at assumed rates, in the package's simulation.

Nothing of it was measured here.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.planner.layout import Layout, choose
from lightning_hanayo.schedule import CostModel, Timeline, simulate
from recipes.h100.counts import BlockCounts, Pass
from recipes.h100.models import Llama


@dataclass(frozen=True)
class Rates:
    """Rates per GPU, each the data sheet's peak and the share of it that is assumed.

    Sources: NVIDIA's H100 data sheet (SXM5: 989 TFLOP/s in bf16 without sparsity, 3.35 TB/s, 80 GB, NVLink 900 GB/s,
    half of it in each direction); NVIDIA's DGX H100 user guide (an adapter of 400 Gbit/s for each GPU). The assumed
    shares are ours. The host's times are those that `recipes.benchmarks.cube_host` and `pipeline` measured on a shared
    core of a virtual machine (6 us per call of a plain block, 9 in a cube; 210 to 380 us per action), rounded.
    """

    flops: float = 989e12
    flops_share: float = 0.6
    """of whole blocks, so elementwise operations are in it"""
    memory: float = 3.35e12
    nvlink: float = 450e9
    network: float = 50e9
    link_share: float = 0.8
    latency: float = 15e-6
    """of a collective or message"""
    memory_bytes: float = 80e9
    memory_share: float = 0.9
    gpus_per_node: int = 8
    host_call: float = 10e-6
    """per operation, with its part of autograd and of the Python that calls it"""
    host_collective: float = 25e-6
    host_message: float = 40e-6
    """to post one send or receive and its header"""
    host_action: float = 200e-6
    """of engine, thread switch and messages' codec, for each forward or backward of a stage"""

    def compute(self, flops: float) -> float:
        """Seconds of so many operations."""
        return flops / (self.flops * self.flops_share)

    def link(self, num_bytes: float, *, within_node: bool) -> float:
        """Seconds to receive so many bytes from other GPUs."""
        return num_bytes / ((self.nvlink if within_node else self.network) * self.link_share)


RATES = Rates()


STATE_BYTES = 18
"""per parameter: values and gradients in bf16, main gradient, master weight and two moments in fp32"""
OPTIMIZER_BYTES = 30
"""that an optimizer step reads and writes per parameter"""


@dataclass(frozen=True)
class Step:
    """One step of `model` on `pipe` x `data` x the mesh, for `sequences` sequences in micro-batches of `samples`."""

    model: Llama
    pipe: int
    data: int
    mesh: MeshSizes
    samples: int
    sequences: int
    counts: BlockCounts
    """of one block"""

    @property
    def num_microbatches(self) -> int:
        """B, of each data rank."""
        return self.sequences // (self.data * self.samples)

    @property
    def tokens(self) -> int:
        """Of a micro-batch, for all ranks of a cube together."""
        return self.samples * self.model.length

    @cached_property
    def layout(self) -> Layout:
        """What the planner chooses for these costs."""
        return choose(
            num_ranks=self.pipe,
            num_blocks=self.model.num_blocks,
            num_microbatches=self.num_microbatches,
            costs=self._costs_of_a_rank,
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated batch, in seconds."""
        return simulate(self.layout.table(self.num_microbatches), self._costs)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.timeline.makespan + self._optimizer

    @property
    def tokens_per_second(self) -> float:
        """For each GPU."""
        return self.sequences * self.model.length / self.seconds / self.num_gpus

    @property
    def num_gpus(self) -> int:
        """Of all data ranks."""
        return self.pipe * self.data * prod(self.mesh)

    @property
    def utilization(self) -> float:
        """The share of the GPUs' peak that the model's own products use: 6 per parameter and token, and attention's."""
        per_token = 6 * (self.model.parameters - self.model.outside_parameters) + self.model.head_flops
        per_token += 6 * self.model.num_blocks * self.model.length * self.model.hidden  # causal: half of the pairs
        return self.tokens_per_second * per_token / RATES.flops

    @property
    def host_share(self) -> float:
        """The host's time for a block's forward and backward, and its share of an action's, over the device's."""
        return self._host / self._device

    @property
    def tokens_for_the_device(self) -> float:
        """Tokens per micro-batch from which the device is the limit: its time grows with them, the host's doesn't."""
        return self.tokens * self.host_share

    @property
    def memory(self) -> float:
        """Bytes of the fullest GPU: optimizer state, activations, and whole parameters outside the stack."""
        ranks = prod(self.mesh)
        state = STATE_BYTES * self._parameters_of_a_rank
        outside = 4 * self.model.outside_parameters if ranks > 1 else 0
        if ranks == 1:  # rank 0 holds them besides its blocks
            state += STATE_BYTES * self.model.outside_parameters * (1 - 1 / self.pipe)
        saved = self.counts.saved * self.model.num_blocks / self.pipe
        return state + outside + saved * max(self.timeline.peak_activations)

    @property
    def fits(self) -> bool:
        """Whether that is less than a GPU has."""
        return self.memory < RATES.memory_bytes * RATES.memory_share

    # times of parts, in seconds

    @property
    def _blocks_per_stage(self) -> float:
        return self.model.num_blocks / self.layout.num_stages

    @property
    def _parameters_of_a_rank(self) -> float:
        return self.model.parameters / (self.pipe * prod(self.mesh))

    @property
    def _passes(self) -> tuple[Pass, Pass]:
        return self.counts.forward, self.counts.backward

    @property
    def _host(self) -> float:
        blocks = sum(one.calls * RATES.host_call + one.collectives * RATES.host_collective for one in self._passes)
        around = 2 * (RATES.host_action + 2 * RATES.host_message * (self.pipe > 1))
        return blocks + around / self._blocks_per_stage

    @property
    def _device(self) -> float:
        return sum(map(self._device_time, self._passes))

    def _device_time(self, one: Pass) -> float:
        within = prod(self.mesh) <= RATES.gpus_per_node
        return RATES.compute(one.flops) + RATES.link(one.received, within_node=within) + RATES.latency * one.collectives

    @property
    def _slowdown(self) -> float:
        return max(1.0, self.host_share)

    @property
    def _head(self) -> float:
        return RATES.compute(self.model.head_flops * self.tokens / prod(self.mesh))

    @property
    def _message(self) -> float:
        num_bytes = 2 * self.tokens * self.model.hidden / prod(self.mesh)
        within = self.pipe * prod(self.mesh) <= RATES.gpus_per_node
        return RATES.latency + RATES.link(num_bytes, within_node=within)

    @property
    def _reduction(self) -> float:
        received = 2 * (self.data - 1) / self.data * 4 * self._parameters_of_a_rank
        return RATES.link(received, within_node=self.num_gpus <= RATES.gpus_per_node)

    @property
    def _optimizer(self) -> float:
        return OPTIMIZER_BYTES * self._parameters_of_a_rank / RATES.memory

    @property
    def _costs_of_a_rank(self) -> CostModel:
        """Times of a rank's whole share, by which the planner chooses the number of waves."""
        forward, backward = (self._device_time(one) * self.model.num_blocks / self.pipe for one in self._passes)
        return CostModel(forward, backward / 2, backward / 2, message=self._message)

    @property
    def _costs(self) -> CostModel:
        """Times of each stage: the head is in the last one's, and an action takes as long as its host."""
        stages, blocks = self.layout.num_stages, self._blocks_per_stage
        forward, backward = (self._slowdown * self._device_time(one) * blocks for one in self._passes)
        head = [0.0] * (stages - 1) + [self._head / 3]
        return CostModel(
            forward=tuple(forward + extra for extra in head),
            backward_input=tuple(backward / 2 + extra for extra in head),
            backward_weight=tuple(backward / 2 + extra for extra in head),
            message=self._message,
            gradient_reduce=self._reduction,
        )
