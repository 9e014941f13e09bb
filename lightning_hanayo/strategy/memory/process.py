"""The most memory that this process has held."""

import resource

import torch


def peak_bytes(device: torch.device) -> int:
    """On an accelerator what torch's allocator has held there at most; on the CPU the memory of the process (RSS)."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    peak: int = torch.get_device_module(device).max_memory_allocated(device)
    return peak
