"""Measures the links between ranks: of processes that it starts here, or of those that a launcher has started."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_hanayo.cli.doctor.host import Finding
from lightning_hanayo.cli.doctor.link_worker import Measured
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy.joining import serve_store

_WORKER = "lightning_hanayo.cli.doctor.link_worker"
_POLL = 0.05
_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The rank of this process and the number of all, if torchrun or SLURM has started it.

    A shell in a job of SLURM is none of its ranks, as for Lightning.

    Raises:
        HanayoError: these variables are no numbers.
    """
    for names in _LAUNCHERS:
        is_shell = names[0].startswith("SLURM") and environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
        if all(name in environment for name in names) and not is_shell:
            return _number(names[0], environment), _number(names[1], environment)
    return None


def _number(name: str, environment: Mapping[str, str]) -> int:
    if not environment[name].isdecimal():
        error = HanayoError(f"{name}={environment[name]}: expected a whole number; unset it if no launcher has set it")
        error.failed_first = True  # no rank is known, so this one says it
        raise error
    return int(environment[name])


def measure_given(rank: int, world_size: int, findings: Sequence[Finding]) -> Measured | Finding:
    """Measure among the ranks that a launcher has started, and tell each other what they have found. Called by all."""
    if "MASTER_ADDR" not in os.environ:  # SLURM gives none
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        environment = SLURMEnvironment()
        os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
    from lightning_hanayo.cli.doctor.link_worker import measure

    try:
        return measure(rank, world_size, findings)
    except RuntimeError as error:  # torch has no narrower type for what it can't reach
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        text = f"rank {rank} has not met the others at {where}: {str(error).splitlines()[0]}"
        return Finding("links", f"{world_size} ranks", text, "problem", "look at the firewall between the nodes")


def measure_here(num_processes: int, timeout: float) -> Measured | Finding:
    """Start so many processes on this host, which measure. None of them is left behind.

    Args:
        timeout: seconds until they are killed.

    Returns:
        What they have measured, or why they couldn't.
    """
    advice = "run it again with HANAYO_DEBUG=1 to see what the processes print"
    with tempfile.TemporaryDirectory(prefix="hanayo-doctor-") as folder:
        result, log = Path(folder) / "measured.json", Path(folder) / "log"
        with _processes(num_processes, result, log) as processes:
            deadline = time.monotonic() + timeout
            while any(one.poll() is None for one in processes) and not any(one.poll() for one in processes):
                if time.monotonic() > deadline:
                    late = [rank for rank, one in enumerate(processes) if one.poll() is None]
                    text = f"ranks {late} have not finished within {timeout:g} s"
                    return Finding("links", f"{num_processes} processes", text, "problem", advice)
                time.sleep(_POLL)
            failed = [(rank, one.poll()) for rank, one in enumerate(processes) if one.poll()]
        if failed:
            printed = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            last = printed[-1] if printed else "it has printed nothing"
            text = f"rank {failed[0][0]} has ended with exit code {failed[0][1]}: {last}"
            return Finding("links", f"{num_processes} processes", text, "problem", advice)
        return Measured.from_json(json.loads(result.read_text()))


@contextmanager
def _processes(count: int, result: Path, log: Path) -> Iterator[Sequence["subprocess.Popen[bytes]"]]:
    """Inside it, the processes run."""
    store = serve_store()
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # it is this process's
    common["OMP_NUM_THREADS"] = "1"
    processes = []
    with log.open("wb") as output:
        shown = None if os.environ.get("HANAYO_DEBUG") else output
        try:
            for rank in range(count):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, "-m", _WORKER, str(result)]
                processes.append(subprocess.Popen(command, env=common | own, stdout=shown, stderr=shown))
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()
