"""Who has started this process, and whether the same one has started the run before: torchrun's agent, or SLURM.

                                  key of the run        who starts it
torchrun, first start             torchrun-<run id>     the agent on this node
torchrun, after a failure         the same              the same agent, or another node's that was there before
torchrun, given a second time     maybe the same        another agent: this is a new run
SLURM, first start                slurm-<job>-<step>    nobody who could have started it before
SLURM, the job is requeued        the same              the job's step, with the same command
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_START_TIME = 19
"""the field of /proc/<pid>/stat, counted after the name in brackets, that tells when a process began"""


@dataclass(frozen=True)
class Launch:
    """One start of this process.

    Args:
        key: names the run, the same in all its starts; a file name.
        starters: who may start the run again, each by a text that nobody else has.
    """

    key: str
    starters: tuple[str, ...]


def this_launch() -> Launch | None:
    """This process's start; None if nobody starts it again after a failure."""
    return launch_from(os.environ, " ".join(sys.argv))


def launch_from(environment: Mapping[str, str], command: str) -> Launch | None:
    """What the variables of torchrun and SLURM say.

    Example:
        >>> launch_from({"SLURM_PROCID": "0", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}, "train.py").key
        'slurm-17-0'
    """
    starters = []
    key = None
    if "SLURM_PROCID" in environment and "SLURM_JOB_ID" in environment:
        key = f"slurm-{environment['SLURM_JOB_ID']}-{environment.get('SLURM_STEP_ID', '0')}"
        starters.append(f"{key} {command}")
    if "TORCHELASTIC_RUN_ID" in environment:
        key = f"torchrun-{environment['TORCHELASTIC_RUN_ID']}"
        starters.append(_agent(environment))
    return None if key is None else Launch(_NOT_IN_NAMES.sub("_", key), tuple(starters))


def is_requeued(environment: Mapping[str, str]) -> bool:
    """Whether SLURM has started this job before."""
    return environment.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Whether this start is counted as a restart: torchrun doesn't count those after which more nodes take part."""
    return is_requeued(environment) or environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _agent(environment: Mapping[str, str]) -> str:
    """torchrun's process on this node: the folder of its logs is its own, else the process that has started this one.

    The folder is above attempt_<number>/<local rank>/error.json.
    """
    host = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else os.uname().nodename
    parents = Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parents
    if len(parents) > 3:
        return f"{host} {parents[2]}"
    pid = os.getppid()
    return f"{host} {pid} {_start_time(pid)}"


def _start_time(pid: int) -> str:
    """When a process began, in ticks since the host did; "" where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[_START_TIME]
