"""Starts the training, kills processes as planned, and starts it again until it has ended.

start     steps 1 .. 43     kill rank 2     the others end     start     from step 40 ..     kill ...     the end
"""

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipes.resume_drill.processes import MARKER, kill, left, rank_process
from recipes.resume_drill.train import DATA, PIDS, PIPE, STEPS
from recipes.resume_drill.victims import Kill, Launcher

ROOT = Path(__file__).parents[2]
POLL_S, END_S, START_S = 0.02, 15.0, 180.0
"""seconds between two looks; until all processes have ended after the first one; until the first step of a start"""
RESTARTS = 100
_SAID = re.compile(r"\brank \d+\b.* (was killed|ended)|^Restored all states|^resum", re.IGNORECASE)


@dataclass(frozen=True)
class Event:
    """Something that has happened in a drill, `seconds` after its begin."""

    seconds: float
    kind: Literal["start", "step", "kill", "said", "left", "end"]
    step: int
    text: str = ""


class DrillFailed(RuntimeError):
    """The training failed for another reason than a kill, or doesn't move."""


class Drill:
    """One training that is killed and resumed until its end.

    Args:
        folder: an empty one.
        num_steps: of the training.
        kills: in the order of their steps.
        launcher: "lightning": the first process starts the others, and the drill starts it again after a kill;
            "torchrun": its agent does, and the drill does if the agent was killed.
        tell: gets each event.
    """

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        kills: Sequence[Kill] = (),
        launcher: Launcher = "lightning",
        tell: Callable[[Event], object] = lambda event: None,
    ) -> None:
        self.folder, self.num_steps, self.launcher = folder, num_steps, launcher
        self.events: list[Event] = []
        self._kills, self._tell, self._mark = list(kills), tell, uuid.uuid4().hex
        self._begin, self._step, self._position = time.monotonic(), 0, 0

    def run(self) -> list[Event]:
        """Train to the end; return what has happened.

        Raises:
            DrillFailed: it failed by itself, or makes no step any more.
        """
        (self.folder / PIDS).mkdir(parents=True)
        try:
            for start in range(RESTARTS):
                self._note("start", f"start {start + 1}")
                if self._one_start(self.folder / f"output-{start}") == 0:
                    self._note("end")
                    return self.events
        finally:
            for pid in left(self._mark):
                kill(pid)
        raise DrillFailed(f"the training was started {RESTARTS} times and has not ended")

    def _one_start(self, log: Path) -> int:
        """Start the command, wait for its end, and return its exit code."""
        num_kills = len(self._kills)
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(), cwd=ROOT, env=self._environment(), stdout=output, stderr=subprocess.STDOUT
            )
        moved = time.monotonic()
        while process.poll() is None:
            moved = time.monotonic() if self._read_steps() else moved
            if self._kills and self._step >= self._kills[0].step and self._kill(process):
                self._kills.pop(0)
            if time.monotonic() - moved > START_S:
                raise DrillFailed(f"no step for {START_S:g} s. The output ends with:\n{_end(log)}")
            time.sleep(POLL_S)
        self._read_steps()
        self._wait_for_end()
        for line in said(log.read_text(errors="replace")):
            self._note("said", line)
        if process.returncode and len(self._kills) == num_kills:
            raise DrillFailed(f"exit code {process.returncode} without a kill. The output ends with:\n{_end(log)}")
        return process.returncode

    def _command(self) -> list[str]:
        training = ["-m", "recipes.resume_drill.train", str(self.folder), str(self.num_steps)]
        if self.launcher == "lightning":
            return [sys.executable, *training]
        agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PIPE * DATA}"]
        return [sys.executable, *agent, f"--max-restarts={RESTARTS}", *training]

    def _environment(self) -> dict[str, str]:
        of_launchers = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
        environment = {name: value for name, value in os.environ.items() if name not in of_launchers}
        return environment | {MARKER: self._mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def _kill(self, launched: "subprocess.Popen[bytes]") -> bool:
        """Kill the next victim; False if it doesn't run yet."""
        planned = self._kills[0]
        if not all(rank_process(self.folder, rank, self._mark) for rank in range(PIPE * DATA)):
            return False
        time.sleep(planned.delay)
        if isinstance(planned.victim, str):
            launched.kill()
        elif (pid := rank_process(self.folder, planned.victim, self._mark)) is None:
            return False
        else:
            kill(pid)
        self._read_steps()
        self._note("kill", str(planned))
        return True

    def _read_steps(self) -> bool:
        """Read which steps were made since the last look; return whether there were any."""
        file = self.folder / STEPS
        if not file.exists():
            return False
        with file.open() as lines:
            lines.seek(self._position)
            made = [line for line in lines.read().splitlines(keepends=True) if line.endswith("\n")]
            self._position += sum(map(len, made))
        for line in made:
            self._step = int(line.split()[0])
            self._note("step")
        return bool(made)

    def _wait_for_end(self) -> None:
        """All others must end by themselves."""
        deadline = time.monotonic() + END_S
        while (still := left(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in still:
            self._note("left", f"process {pid} still runs after {END_S:g} s, and is killed")
            kill(pid)

    def _note(self, kind: Literal["start", "step", "kill", "said", "left", "end"], text: str = "") -> None:
        event = Event(time.monotonic() - self._begin, kind, self._step, text)
        self.events.append(event)
        self._tell(event)


def said(output: str) -> Iterator[str]:
    """The lines that say who was killed, and from where the training goes on."""
    for line in dict.fromkeys(output.splitlines()):
        if _SAID.search(line):
            yield line.strip()


def _end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
