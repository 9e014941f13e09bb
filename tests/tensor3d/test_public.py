"""What `lightning_hanayo.tensor_parallel` exports, how little registering a block imports, and the guide's example."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_hanayo import tensor_parallel
from tests.harness.mesh import process_group
from tests.harness.pool import Pool

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "tensor3d-layers.md"
TEXT = GUIDE.read_text(encoding="utf-8")
EXAMPLE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]


def test_every_export_is_there_and_in_the_guide_or_on_the_cubes_page() -> None:
    pages = TEXT + (GUIDE.parents[1] / "concepts" / "cube.md").read_text(encoding="utf-8")
    for name in tensor_parallel.__all__:
        assert getattr(tensor_parallel, name) is not None
    layers = [name for name in tensor_parallel.__all__ if name.lower().endswith("3d")]
    assert [name for name in layers if f"`{name}`" not in pages] == []
    with pytest.raises(AttributeError, match="nothing"):
        _ = tensor_parallel.nothing


def test_registering_a_block_imports_no_torch() -> None:
    code = "import sys, recipes.gpt, recipes.bert; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=GUIDE.parents[2])


def example_losses(in_group: bool) -> list[float]:
    names: dict[str, Any] = {}
    if in_group:
        with process_group():
            exec(EXAMPLE, names)
    else:
        exec(EXAMPLE, names)
    losses: list[float] = names["losses"]
    return losses


def test_the_guides_example_is_the_same_on_one_rank_and_on_four(pool: Pool) -> None:
    alone = example_losses(False)
    for losses in pool.run(4, example_losses, True):
        assert losses == pytest.approx(alone, rel=1e-4)


def test_the_guides_links_lead_somewhere() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", TEXT)]
    assert [link for link in links if not (GUIDE.parent / link).is_file()] == []
