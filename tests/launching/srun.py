"""A stand-in for SLURM's srun on one machine:  srun.py NODES TASKS_PER_NODE COMMAND ...

Starts the tasks of all nodes with the variables that SLURM sets, and ends with the largest exit code.
"""

import os
import subprocess
import sys


def main(num_nodes: int, tasks_per_node: int, command: list[str]) -> int:
    """Run the tasks, and return the exit code."""
    num_tasks = num_nodes * tasks_per_node
    common = {
        "SLURM_JOB_ID": str(4_000_000 + os.getpid()), "SLURM_JOB_NAME": "training", "SLURM_NNODES": str(num_nodes),
        "SLURM_NTASKS": str(num_tasks), "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_NODELIST": ",".join(["127.0.0.1"] * num_nodes), "SLURM_JOB_NODELIST": "127.0.0.1",
    }  # fmt: skip
    tasks = []
    for task in range(num_tasks):
        node, local = divmod(task, tasks_per_node)
        own = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        tasks.append(subprocess.Popen(command, env=os.environ | common | own))
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
