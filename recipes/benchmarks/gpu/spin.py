"""A kernel whose thread blocks spin for a set time, as those of a receive do that waits for its sender.

It has 512 threads per block, as NCCL's kernels have. A large matrix product's block takes nearly all registers of an
SM, so none fits next to one that spins.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

WARPS = 16


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _now():  # type: ignore[no-untyped-def] # Triton reads no hints
    """The GPU's clock, in nanoseconds."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _spin(ends, nanoseconds):  # type: ignore[no-untyped-def]
    """Spin, and store when each block ended."""
    start = _now()
    now = start
    while now - start < nanoseconds:
        now = _now()
    tl.store(ends + tl.program_id(0), now)


def spin(num_blocks: int, seconds: float) -> None:
    """Launch `num_blocks` thread blocks on the current stream; each spins for that long."""
    ends = torch.empty(num_blocks, dtype=torch.int64, device="cuda")
    _spin[(num_blocks,)](ends, int(1e9 * seconds), num_warps=WARPS)
