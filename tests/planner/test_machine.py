"""Machines: files, rates between measured sizes, links between ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.machine import KNOWN, Link, Machine, machine

MEASURED = Machine(
    "node07",
    ranks_per_node=8,
    memory=80e9,
    matmul={"float32": ((256.0, 1e12), (1024.0, 3e12))},
    memory_bandwidth=2e12,
    within_node=Link(1e-5, 3e11),
    between_nodes=Link(2e-5, 4e10),
    source="a test",
)


@pytest.mark.parametrize("own", [MEASURED, *KNOWN.values()], ids=lambda own: own.name)
def test_what_is_saved_is_loaded(own: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    own.save(path)
    assert Machine.load(path) == own


def test_rates_between_sizes() -> None:
    assert [MEASURED.matmul_rate("float32", size) for size in (1, 256, 512, 1024, 9999)] == [
        1e12,
        1e12,
        2e12,
        3e12,
        3e12,
    ]
    assert MEASURED.matmul_rate("bfloat16", 1024) == 3e12, "of the dtype that was measured"


def test_a_dtype_without_rates() -> None:
    both = replace(MEASURED, matmul={"bfloat16": ((1.0, 4e12),), "float32": ((1.0, 1e12),)})
    assert both.matmul_rate("float16", 1) == 4e12, "as wide"
    assert both.matmul_rate("float64", 1) == 1e12, "the next narrower"
    wide = replace(MEASURED, matmul={"bfloat16": ((1.0, 4e12),), "float64": ((1.0, 5e11),)})
    assert wide.matmul_rate("float32", 1) == 5e11, "the next wider"


def test_a_rate_of_another_dtype_is_said() -> None:
    said = {dtype: KNOWN["h100"].rate_note(dtype) for dtype in ("bfloat16", "float16", "float32", "float64")}
    assert said["bfloat16"] == "" and said["float16"] == " at the rate of bfloat16"
    assert said["float32"] == said["float64"]
    assert said["float32"].startswith(" at the rate of TF32") and "set_float32_matmul_precision" in said["float32"]
    assert MEASURED.rate_note("float32") == "" == KNOWN["cpu"].rate_note("float32"), "what is measured is what it says"


def test_a_link_within_a_node_or_between() -> None:
    within, between = MEASURED.within_node, MEASURED.between_nodes
    assert MEASURED.link(1, 8) == MEASURED.link(2, 4) == within
    assert MEASURED.link(1, 16) == MEASURED.link(8, 2) == between
    assert replace(MEASURED, ranks_per_node=16).link(8, 2) == within
    assert within.seconds(3e11) == pytest.approx(1 + 1e-5)
    assert within.seconds(0) == 0, "nothing is sent"


WRONG: dict[str, Any] = {
    "unknown": {"speed": 1},
    "no_memory": {"memory": 0},
    "text": {"memory_bandwidth": "fast"},
    "no_rates": {"matmul": {}},
    "dtype": {"matmul": {"int4": [[1, 1]]}},
    "negative": {"host_action": -1},
    "link": {"within_node": {"latency": 0, "bandwidth": 0}},
    "half_a_link": {"between_nodes": {"latency": 0}},
    "half_a_rank": {"ranks_per_node": 0.5},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_no_machine(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    MEASURED.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(HanayoError, match=r"machine\.json is no machine: .*hanayo doctor --measure"):
        Machine.load(path)


def test_no_such_machine(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match="device 'h10' is unknown; did you mean 'h100'"):
        machine("h10")
    with pytest.raises(HanayoError, match="can't be read: No such file"):
        Machine.load(tmp_path / "none.json")
