"""The page about the cube has the tables that the command makes, and its snippets run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.cube import volumes
from recipes.cube.page import BLOCKS, DOCS, PAGE
from recipes.paper.page import blocks_in

TEXT = PAGE.read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_table_is_as_made(name: str) -> None:
    assert blocks_in(TEXT)[name] == BLOCKS[name](), "run python -m recipes.cube"


def test_links_lead_somewhere_and_pictures_are_small() -> None:
    files = [PAGE.parent / link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if not link.startswith("http")]
    assert [file for file in files if not file.is_file()] == []
    assert all(file.stat().st_size < 150_000 for file in files if file.suffix == ".png")
    assert (DOCS.parent / "recipes" / "gpt" / "cube.yaml").is_file() and "recipes/gpt/cube.yaml" in TEXT


def test_the_choice_of_a_mesh_runs() -> None:
    exec(next(snippet for snippet in SNIPPETS if "best_mesh" in snippet), {})


@pytest.mark.parametrize("tokens", volumes.TOKENS)
def test_bars_add_up_to_the_volume(tokens: int) -> None:
    layer = volumes.layer_of(tokens, 4096)
    for one in ((2, 2, 2), (4, 2, 1), (1, 8, 1), (1, 1, 8)):
        assert sum(volumes.parts(layer, one)) == pytest.approx(layer.volume(one).total / (tokens * 4096))
    assert volumes.parts(layer, (1, 8, 1)) == (7.0, 0.0, 0.0), "1-D moves activations alone"


def test_small_bars_are_drawn(tmp_path: Path) -> None:
    volumes.draw(tmp_path / "bars.png", ranks=(4,), tokens=(2048,), hidden=1024)
    assert (tmp_path / "bars.png").stat().st_size > 5000


def test_the_command_needs_no_torch() -> None:
    code = "import sys, recipes.cube.page; print([name for name in ('torch', 'lightning') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=DOCS.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
