"""The benchmark of checkpoints with a tiny model: every way's values come back, and JSON, table and picture are made.

2 ranks, 4 blocks each     model/blocks.0.mlp.up.weight  optimizer/0/blocks.0.mlp.up.weight/exp_avg  .../step
"""

import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from recipes.benchmarks.checkpoints.__main__ import CaseFigures, main, text
from recipes.benchmarks.checkpoints.rank import NAMES, Plan, RankRecord, run_all
from recipes.benchmarks.checkpoints.ways import BLOCKS, Sizes, State, blocks_of
from tests.harness.pool import Pool

TINY = Sizes(4)


def run(plan: Plan) -> RankRecord:
    dist.init_process_group("gloo")
    return run_all(dist.get_rank(), plan)


@pytest.mark.thorough
def test_every_way_brings_the_saved_values_back(pool: Pool, tmp_path: Path) -> None:
    case = CaseFigures.combined(pool.run(2, partial(run, Plan(TINY, tmp_path, num_rounds=1, products=0))))
    assert [one.name for one in case.saves] == list(NAMES)
    assert [one.name for one in case.loads] == [
        "ours, verified",
        "ours, sizes only",
        "torch",
        "one file",
        "bytes alone",
    ]
    assert all(one.equal for one in case.loads)
    assert all(case.num_bytes <= one.written and one.blocked.least <= one.whole.least for one in case.saves)
    assert not list(tmp_path.iterdir()), "checkpoints are removed"
    check_output(case, tmp_path)


def check_output(case: CaseFigures, folder: Path) -> None:
    found, page, picture = (folder / f"found.{kind}" for kind in ("json", "md", "png"))
    found.write_text(json.dumps({"machine": ["a machine"], "cases": [asdict(case)]}))
    assert main(["--again", str(found), "--table", str(page), "--picture", str(picture)]) == 0
    assert page.read_text() == text([case], ["a machine"]) and picture.read_bytes().startswith(b"\x89PNG")
    wrong = replace(case, loads=(replace(case.loads[0], equal=False),))
    assert text([wrong], []).count("| NO |") == 1


def test_the_ranks_divide_the_blocks() -> None:
    assert [block for rank in range(3) for block in blocks_of(rank, 3)] == list(range(BLOCKS))
    names = [name for rank in range(2) for name in State(TINY, rank, 2).tensors]
    assert names == [name for name, _ in TINY.shapes(range(BLOCKS))]


def test_the_model_has_the_size_that_was_asked_for() -> None:
    sizes = Sizes.of_bytes(2e9)
    elements = sum(math.prod(shape) for _, shape in sizes.shapes(range(BLOCKS)))
    assert 4 * elements == pytest.approx(2e9, rel=0.01)


def test_a_spoiled_or_changed_state_is_seen() -> None:
    state = State(TINY, 0, 1)
    digest = state.digest()
    state.change()
    assert state.digest() != digest
    state.change()
    assert state.digest() == digest
    state.spoil()
    assert state.digest() != digest


def test_bad_figures_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "found.json").write_text("[]")
    assert main(["--again", str(tmp_path / "found.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
