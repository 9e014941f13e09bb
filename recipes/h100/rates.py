"""What the page takes for granted: rates of an H100, of its links, and of the host. Nothing of it was measured here."""

from dataclasses import dataclass


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
