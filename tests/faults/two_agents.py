"""Starts two torchrun agents on this host, as if they were two nodes:  two_agents.py PORT SCRIPT ARGUMENTS...

The run goes on with one of them. Ends with the first one's exit code.
"""

import subprocess
import sys
import time


def main(port: str, *command: str) -> int:
    options = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=two"]
    options += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=last_call_timeout=5"]
    agents = []
    for _ in range(2):
        agents.append(subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *options, *command]))
        time.sleep(1.0)  # the first one makes the store
    return agents[0].wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
