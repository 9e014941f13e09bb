"""A rank is killed in a training: the others end within seconds, and one of them says which, where and how.

P = 4                0    1    2    3         each killed in turn
P = 2, D = 2         0 1 | 2 3                rank 2 is (pipeline 0, data 1)
P = 2, cube 1x2x1    0 1 | 2 3                rank 3 is (pipeline 1, cube (0, 1, 0))
"""

from pathlib import Path

import pytest

from tests.faults import script
from tests.harness.launch import launch
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered

ENDS = {
    "SIGKILL": "was killed (signal 9)",
    "SIGSEGV": "was killed (signal 11, segmentation fault)",
    "3": "ended with exit code 3 without saying why",
}
PLACES = {
    ((4, 1), 1): ["pipeline 0", "pipeline 1", "pipeline 2", "pipeline 3"],
    ((2, 2), 1): ["pipeline 0, data 0", "pipeline 1, data 0", "pipeline 0, data 1", "pipeline 1, data 1"],
    ((2, 1), 2): [f"pipeline {pipe}, cube (0, {y}, 0)" for pipe in (0, 1) for y in (0, 1)],
}
KILLED = [
    (sizes, cube, rank, site, how)
    for sizes, cube in PLACES
    for rank in range(4)
    for site in ("training_step", "backward", "hook")
    for how in ENDS
    if site != "training_step" or "pipeline 0" in PLACES[sizes, cube][rank]  # only there is it called
]


@pytest.mark.parametrize(
    ("sizes", "cube", "rank", "site", "how"),
    covered(KILLED, by=[((4, 1), 1, 0, "backward", "SIGKILL")]),
)
def test_the_others_say_who_was_killed(
    pool: Pool, sizes: tuple[int, int], cube: int, rank: int, site: str, how: str
) -> None:
    fault = script.Fault(site, str(rank), how)
    with pytest.raises(RunFailed) as caught:
        pool.run(4, script.train, *sizes, fault, (1, cube, 1), timeout=60.0)
    failures = {one.rank: one for one in caught.value.failures}
    said = f"rank {rank} ({PLACES[sizes, cube][rank]}) {ENDS[how]}"
    others = [failures[other] for other in range(4) if other != rank]
    assert failures[rank].kind == "died"
    assert [(one.kind, one.message) for one in others] == [("PeerFailed", said)] * 3, str(caught.value)
    assert "".join(one.output for one in others).count(said) == 1, str(caught.value)


@pytest.mark.thorough  # with real launches, one of which takes 20 s
@pytest.mark.parametrize(
    ("rank", "how", "said"),
    [
        (0, "SIGKILL", "was killed (signal 9)"),
        (2, "SIGKILL", "was killed (signal 9)"),
        (1, "SIGSTOP", "was stopped (SIGSTOP or SIGTSTP) 15 s ago"),
        (0, "SIGSTOP", "was stopped (SIGSTOP or SIGTSTP) 15 s ago"),
    ],
)
def test_a_launched_run_ends_and_says_why(tmp_path: Path, rank: int, how: str, said: str) -> None:
    limit = 25.0 if how == "SIGSTOP" else 10.0  # a process may be stopped for 15 s
    ended = launch(tmp_path, str(Path(script.__file__)), "4", "1", "hook", str(rank), how, limit=limit)
    assert ended.output.count(f"rank {rank} (pipeline {rank}) {said}") == 1, ended.output
    assert "Traceback" not in ended.output and "frame #" not in ended.output, ended.output
    assert not ended.leftover, ended.output
    assert ended.code == (-9 if rank == 0 else 1), ended.output
