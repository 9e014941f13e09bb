"""Judges from outside how a run with a fault has ended.

| verdict  | holds if                                                                                            |
|----------|-----------------------------------------------------------------------------------------------------|
| detected | the run ended by itself, or said that it makes no progress, before the limit                        |
| named    | a line of the output has the rank and the cause                                                     |
| clean    | all ended in time with the right exit code, the cause was shown once and last, nothing is left      |
| lost     | the newest checkpoint is damaged or older than the last save; or a signal came and nothing was saved |
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.battery.cases import PEERS, Case
from tests.faults.battery.fault import CAUSE, Kind
from tests.faults.battery.newest import newest_step
from tests.harness.launch import Ended

RANK = r"\brank ?{rank}\b"
CAUSES: dict[Kind, str] = {
    "kill": r"killed.*\bsignal 9\b",
    "stop": r"\bstopped\b|SIGSTOP",
    "sigterm": r"SIGTERM",
    "sigint": r"SIGINT",
    "exception": CAUSE,
    "hang": r"time\.sleep",
    "gil": r"does not answer: .*\bGIL\b",
    "nan": r"\bNaN\b|\bnot finite\b|\binfinite\b",
}
"""what a line that names the cause has, besides the rank"""
SUMMARY = r"torch/distributed/elastic\S* failed \(exitcode"
"""where torchrun begins to tell how its processes have ended"""
LIMITS: dict[Kind, float] = {"stop": 25.0, "hang": 75.0, "gil": 75.0}
"""seconds until all have ended: a stopped process is a failure after 15 s, a hang at the time-out of 60 s; else:"""
LIMIT = 10.0
PEERS_LIMITS = LIMITS | {"stop": 75.0}
"""Lightning's own strategies end waiting at the time-out alone."""
CODES: dict[Kind, int] = {"sigterm": 75, "sigint": 130}
"""the launcher's exit code; 1 for others"""


@dataclass(frozen=True)
class Verdict:
    """What the battery found about a case, with reasons for what isn't as it should be."""

    injected: bool
    detected: bool
    named: bool
    clean: bool
    lost: bool
    seconds: float
    code: int
    reasons: tuple[str, ...]


def judge(case: Case, ended: Ended, checkpoints: Path, injected: bool) -> Verdict:
    """Judge a run by its output, its exit code, and what it left behind."""
    detected = not ended.leftover or bool(re.search("no progress", ended.output, re.IGNORECASE))
    unclean, lost = list(_unclean(case, ended, checkpoints)), _lost(case, checkpoints)
    named = _named(case, ended.output)
    reasons = (["not detected"] * (not detected), ["not named"] * (not named), unclean, lost)
    return Verdict(
        injected, detected, named, not unclean, bool(lost), round(ended.seconds_after_fault, 1), ended.code,
        tuple(reason for part in reasons for reason in part),
    )  # fmt: skip


def limit(case: Case) -> float:
    """Scaled seconds in which all processes should have ended after the fault."""
    return (PEERS_LIMITS if case.layout in PEERS else LIMITS).get(case.kind, LIMIT)


def _named(case: Case, output: str) -> bool:
    rank, cause = RANK.format(rank=case.rank), _cause(case)
    lines = [line for line in output.splitlines() if re.search(cause, line, re.IGNORECASE)]
    return any(re.search(rank, line, re.IGNORECASE) for line in lines)


def _cause(case: Case) -> str:
    """While a rank imports no code of ours runs in it: others say that it is missing."""
    if case.site == "import" and case.kind == "exception":  # below Python's traceback
        return r"ended with exit code 1 before it joined"
    return r"not joined the run" if case.site == "import" and case.kind == "hang" else CAUSES[case.kind]


def _unclean(case: Case, ended: Ended, checkpoints: Path) -> Iterator[str]:
    if ended.leftover:
        yield f"{len(ended.leftover)} processes left"
    elif ended.seconds_after_fault > limit(case):
        yield f"took {ended.seconds_after_fault:.0f} s"
    if ended.code != _code(case) and not (case.layout in PEERS and ended.code not in (0, None)):
        yield f"exit code {ended.code}, not {_code(case)}"
    yield from _not_once_and_last(case, ended.output)
    stray = [path.name for path in checkpoints.parent.rglob("*.tmp-*")]
    stray += [path.name for pid in ended.started for path in Path("/dev/shm").glob(f"torch_{pid}_*")]
    if stray:
        yield f"left {', '.join(stray[:3])}"


def _code(case: Case) -> int:
    if case.launcher == "torchrun":
        return 1
    if case.rank == 0 and case.kind in ("kill", "stop", "gil"):
        return -9  # rank 0 is the launcher; one that can't end itself is killed by a peer
    return CODES.get(case.kind, 1)


def _not_once_and_last(case: Case, output: str) -> Iterator[str]:
    """The cause is shown once, and no traceback or error of another kind comes after it.

    The summary in which torchrun repeats the errors of all ranks isn't ours, and isn't counted.
    """
    output = re.split(SUMMARY, output)[0] if case.launcher == "torchrun" else output
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.strip().startswith("raise ")]
    cause = CAUSES[case.kind] if case.kind == "exception" else _cause(case)
    found = [index for index, line in enumerate(lines) if re.search(cause, line, re.IGNORECASE)]
    if not found:
        yield "the cause isn't shown"
        return
    if len(found) > 1 and case.kind in ("exception", "nan", "kill"):
        yield f"the cause is shown {len(found)} times"
    after = lines[found[-1] :]
    if case.launcher == "lightning" and any(re.match(r"(\[rank\d+\]: ?)?Traceback", line) for line in after):
        yield "another traceback comes after the cause"
    if any("frame #" in line for line in lines):
        yield "C++ frames are shown"


def _lost(case: Case, checkpoints: Path) -> list[str]:
    """Compare the newest checkpoint with the steps that the script has written down."""
    steps = checkpoints.with_name("steps")
    saved, done = (int(step) for step in steps.read_text().split()) if steps.exists() else (0, 0)
    try:
        newest = newest_step(checkpoints)
    except Exception as error:  # whatever a damaged checkpoint gives
        return [f"a checkpoint is damaged: {error}"[:300]]
    expected = done if case.kind in CODES else saved
    return [f"the newest checkpoint is of step {newest}, not {expected}"] if newest < expected else []
