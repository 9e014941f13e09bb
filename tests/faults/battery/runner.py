"""Runs cases of the battery, some at a time, each in a launch of its own, and keeps what was found as JSON."""

import json
import multiprocessing
import site
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_hanayo.monitor.processes import end_with_parent
from tests.faults.battery.cases import Case
from tests.faults.battery.judge import Verdict, judge, limit
from tests.harness.launch import ROOT, launch

SCRIPT = Path(__file__).with_name("script.py")
SPARE = 5.0
"""seconds that a run gets beyond the limit, so that what is a little late can be told from what never ends"""


@dataclass(frozen=True)
class Result:
    """A case, what was found, and what the run printed."""

    case: Case
    verdict: Verdict
    output: str

    def document(self) -> dict[str, Any]:
        """As JSON; of the output the end is kept, without this machine's folders."""
        output = self.output[-6000:]
        for folder in (ROOT, *site.getsitepackages(), Path(sys.executable).parent):
            output = output.replace(f"{folder}/", "")
        return {"case": asdict(self.case), "verdict": asdict(self.verdict), "output": output}

    @classmethod
    def of(cls, document: dict[str, Any]) -> "Result":
        """The inverse of `document`."""
        verdict = document["verdict"] | {"reasons": tuple(document["verdict"]["reasons"])}
        return cls(Case(**document["case"]), Verdict(**verdict), document["output"])


def run(case: Case) -> Result:
    """Launch a training with the fault, wait for its end, and judge it."""
    with tempfile.TemporaryDirectory(prefix="battery-") as name:
        folder = Path(name)
        script = [str(SCRIPT), case.layout, case.kind, case.site, str(case.rank), str(folder / "checkpoints")]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        command = torchrun + script if case.launcher == "torchrun" else script
        ended = launch(folder, *command, timeout=300.0, limit=limit(case) + SPARE)
        verdict = judge(case, ended, folder / "checkpoints", injected=(folder / "fault").exists())
        return Result(case, verdict, ended.output)


def run_all(cases: Sequence[Case], at_once: int, seen: Callable[[Result], object]) -> None:
    """Run the cases in processes of their own; `seen` gets each result when it is there."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, mp_context=context, initializer=end_with_parent) as processes:
        for future in as_completed([processes.submit(run, case) for case in cases]):
            seen(future.result())


def read(path: Path) -> dict[str, Result]:
    """The results in a file, by the name of the case."""
    documents = json.loads(path.read_text())["results"] if path.exists() else []
    return {result.case.name: result for result in map(Result.of, documents)}


def write(path: Path, results: dict[str, Result], about: dict[str, Any]) -> None:
    """Replace the file."""
    document = {"about": about, "results": [result.document() for result in results.values()]}
    path.write_text(json.dumps(document, indent=1) + "\n")
