"""The tier of a test follows from its path."""

import pytest

from tests.harness.tiers import Durations, tier_of


@pytest.mark.parametrize(
    ("path", "tier"),
    [
        ("tests/test_topology.py::test_resolve[4]", "deciding"),
        ("tests/schedule/test_wave.py::test_order", "deciding"),
        ("tests/runtime/deep/test_engine.py::test_runs", "executing"),
        ("tests/faults/test_exceptions.py::test_ends", "integrating"),
        ("tests/gpu/test_nccl.py::test_ends", "gpu"),
        ("tests/unheard_of/test_it.py::test_it", "integrating"),
    ],
)
def test_tier_of_a_path(path: str, tier: str) -> None:
    assert tier_of(path) == tier


def test_durations_add_up_per_tier() -> None:
    durations = Durations()
    for phase in (0.25, 1.0, 0.25):  # set-up, call, teardown
        durations.add("tests/gpu/test_nccl.py::test_ends", phase)
    durations.add("tests/schedule/test_wave.py::test_order", 0.5)
    assert [line.split() for line in durations.lines()] == [
        ["deciding", "1", "tests", "0.5", "s"],
        ["gpu", "1", "tests", "1.5", "s"],
    ]
