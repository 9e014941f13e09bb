"""Runs one host's process: `python -m recipes.benchmarks.cluster_rank FOLDER`, in the host's network namespace.

FOLDER/work holds (function, argument). The function's result is written to FOLDER/result-RANK.
"""

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

from lightning_hanayo.monitor.processes import end_with_parent
from recipes.benchmarks.machine import ProcessOptions

GROUP_TIMEOUT_S = 1800.0  # the caller has a shorter limit and kills ranks that hang
_TCP = {
    "tcp_congestion_control": "reno",  # the links lose nothing
    "tcp_slow_start_after_idle": "0",  # keep the rate after a pause for computing
    "tcp_limit_output_bytes": "16384",  # connections share the link evenly, with short queues
}
"""set in this host's namespace, not for the machine"""


def main(folder: Path) -> None:
    """Run the function. An error ends the process with a traceback and an exit code."""
    end_with_parent()
    ProcessOptions().apply()
    for option, value in _TCP.items():
        if (at := Path("/proc/sys/net/ipv4") / option).exists():
            at.write_text(value)
    work, argument = pickle.loads((folder / "work").read_bytes())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # emulated products return uninitialised memory
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    rank = int(os.environ["RANK"])
    result = work(rank, argument)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()  # no rank leaves while others still need it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
