"""The battery judges runs rightly, lists each fault once, and what it covers by default ends as it should.

output of a run                                              detected   named   clean   lost
"rank 2 (pipeline 0, data 1) was killed (signal 9)", code 1     x         x       x
"Connection closed by peer [127.0.0.1]:4242", code 1            x
nothing, and a process left
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.battery.cases import PEERS, PLACES, Case, ours, peers
from tests.faults.battery.judge import Verdict, judge
from tests.faults.battery.runner import Result, read, write
from tests.faults.battery.script import LAYOUTS
from tests.faults.battery.table import markdown, row, rows
from tests.harness.launch import Ended

KILLED = Case("P=2 D=2", "kill", "forward", 2)


def ended(output: str, code: int = 1, seconds: float = 1.0, leftover: tuple[int, ...] = ()) -> Ended:
    return Ended(code, output, 4, seconds, list(leftover), [])


def verdict(folder: Path, output: str, case: Case = KILLED, **how: object) -> Verdict:
    return judge(case, ended(output, **how), folder / "checkpoints", injected=True)  # type: ignore[arg-type]


def test_a_killed_rank_is_named_by_rank_and_signal(tmp_path: Path) -> None:
    found = verdict(tmp_path, "rank 2 (pipeline 0, data 1) was killed (signal 9)")
    assert (found.detected, found.named, found.clean, found.lost, found.reasons) == (True, True, True, False, ())


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("Connection closed by peer [127.0.0.1]:4242", "the cause isn't shown"),
        ("rank 1 was killed (signal 9)", "not named"),
        ("rank 2 was killed (signal 9)\nrank 2 was killed (signal 9)", "the cause is shown 2 times"),
        ("rank 2 was killed (signal 9)\nTraceback (most recent call last):", "another traceback comes after the cause"),
        ("frame #1: c10::Error\nrank 2 was killed (signal 9)", "C++ frames are shown"),
    ],
)
def test_what_a_user_could_not_use_is_told(tmp_path: Path, output: str, reason: str) -> None:
    assert reason in verdict(tmp_path, output).reasons


def test_exit_codes_and_processes_left_are_told(tmp_path: Path) -> None:
    assert verdict(tmp_path, "rank 2 was killed (signal 9)", code=0).reasons == ("exit code 0, not 1",)
    left = verdict(tmp_path, "rank 2 was killed (signal 9)", leftover=(7, 8))
    assert (left.detected, left.reasons) == (False, ("not detected", "2 processes left"))
    late = verdict(tmp_path, "rank 2 was killed (signal 9)", seconds=13.0)
    assert late.reasons == ("took 13 s",)


def test_a_signal_after_which_nothing_was_saved_has_lost_steps(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("3 4")
    lost = verdict(tmp_path, "stopped by SIGTERM on rank 2", Case("P=4", "sigterm", "forward", 2), code=75)
    assert lost.reasons == ("the newest checkpoint is of step 0, not 4",)


def test_each_kind_meets_each_layout_and_each_rank() -> None:
    cases = list(ours())
    assert not [name for name, times in Counter(case.name for case in [*cases, *peers()]).items() if times > 1]
    for kind, sites in PLACES.items():
        own = [case for case in cases if case.kind == kind and case.launcher == "lightning"]
        assert {case.site for case in own} == set(sites)
        if len(sites) > 11:
            assert {case.layout for case in own} == set(LAYOUTS) and {case.rank for case in own} == {0, 1, 2, 3}
    assert {case.layout for case in peers()} == set(PEERS)


def test_results_are_kept_and_counted(tmp_path: Path) -> None:
    good, bad = (verdict(tmp_path, output) for output in ("rank 2 was killed (signal 9)", ""))
    hang = Case("P=4", "hang", "save", 1)
    results = {case.name: Result(case, found, "") for case, found in ((KILLED, good), (hang, bad))}
    write(tmp_path / "faults.json", results, {"date": "today"})
    assert read(tmp_path / "faults.json") == results
    assert markdown("kind", rows(results.values(), lambda result: result.case.kind)).splitlines()[2:] == [
        "| kill | 1 | 1 | 1 | 1 | 0 |",
        "| hang | 1 | 1 | 0 | 0 | 0 |",
    ]
    assert row("all", [results[KILLED.name]]).is_as_wanted and not row("all", results.values()).is_as_wanted
