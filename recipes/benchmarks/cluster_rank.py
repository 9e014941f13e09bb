"""A host's process: `python -m recipes.benchmarks.cluster_rank FOLDER`, started inside the host's network namespace.

FOLDER/work holds (function, argument); the function's result goes to FOLDER/result-RANK.
"""

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

from recipes.benchmarks.machine import ProcessOptions

GROUP_TIMEOUT_S = 1800.0  # the caller ends a rank that hangs, by its own limit
_TCP = {
    "tcp_congestion_control": "reno",  # the links lose nothing
    "tcp_slow_start_after_idle": "0",  # computing isn't a reason to begin slowly again
    "tcp_limit_output_bytes": "16384",  # a host's connections share its link evenly, none has a long queue ahead
}
"""this host's own settings, not the machine's"""


def main(folder: Path) -> None:
    """Do the work; whatever goes wrong ends in a traceback and an exit code."""
    ProcessOptions().apply()
    for option, value in _TCP.items():
        if (at := Path("/proc/sys/net/ipv4") / option).exists():
            at.write_text(value)
    work, argument = pickle.loads((folder / "work").read_bytes())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # emulated products are memory as it was found
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    rank = int(os.environ["RANK"])
    result = work(rank, argument)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()  # nobody leaves while others still need it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
