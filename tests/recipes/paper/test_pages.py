"""The blocks of the pages equal the command's output."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.paper.catalogue import PICTURED, file_name
from recipes.paper.contender import Contender
from recipes.paper.page import blocks_in, percent
from recipes.paper.pages import DOCS, DOCUMENTS, Document
from recipes.paper.peers import SIZES, measured
from recipes.paper.uneven import Condition, contest

SLOW = "cube-", "equal-memory-8", "ranks", "waves"
QUICK = [
    pytest.param(document, name, marks=[pytest.mark.thorough] if name.startswith(SLOW) else [])
    for document in DOCUMENTS
    for name in document.quick
]


def cells_of(name: str) -> list[list[str]]:
    """The rows of a block of the reproduction page, without its header."""
    rows = blocks_in((DOCS / "reproduction.md").read_text(encoding="utf-8"))[name].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(
    ("document", "name"), QUICK, ids=lambda value: value if isinstance(value, str) else value.path.stem
)
def test_a_block_is_up_to_date(document: Document, name: str) -> None:
    written = blocks_in(document.path.read_text(encoding="utf-8"))[name]
    assert written == document.quick[name](), "run python -m recipes.paper"


@pytest.mark.thorough
def test_a_cell_of_the_smaller_budgets_is_up_to_date() -> None:
    rows = blocks_in((DOCS / "reproduction.md").read_text(encoding="utf-8"))["budgets-4"].splitlines()
    column = rows[0].split(" | ").index("W = 2, B = P")
    row = next(row for row in rows if row.startswith("| 0.75 P"))
    found = measured(Contender("hanayo-zb", num_waves=2, budget=0.75), 4, 1)
    assert found is not None
    assert row.split(" | ")[column] == percent(found.bubble), "run python -m recipes.paper"


def test_a_row_with_messages_is_up_to_date() -> None:
    condition = Condition(2, 0.05)
    rows = cells_of("uneven-8")
    first = [row[0] for row in rows].index(condition.label)
    found = contest(condition, 8, 2)
    times = (f"{time:.2f}" for time in (found.theirs, found.ours, found.bound))
    assert rows[first + 1] == ["", "2", found.peer, *times, found.verdict], "run python -m recipes.paper"


@pytest.mark.parametrize("num_ranks", SIZES)
def test_peers_are_faster_only_where_no_wave_could_be_as_fast(num_ranks: int) -> None:
    rows = cells_of(f"uneven-{num_ranks}")
    faster = [row[0] for row in rows if not row[-1].replace(".", "").isdigit()]
    assert faster == ["stage P x 1.5, T_C = 0", "stage P x 1.5, T_C = 0.05"]
    assert all(float(row[-1]) <= 1 for row in rows if row[0] not in faster)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_in_three_quarters_of_the_memory_waves_idle_less_than_zb_h1(num_ranks: int) -> None:
    (budget,) = (row for row in cells_of(f"budgets-{num_ranks}") if row[0] == "0.75 P")
    (peer,) = (row for row in cells_of(f"equal-memory-{num_ranks}") if row[0] == "zb-h1")
    bubbles = [float(cell.rstrip(" %")) for cell in budget[1:]]
    for load, theirs in enumerate(peer[1:4]):
        assert max(bubbles[load::3]) < float(theirs.rstrip(" %"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.path.stem)
def test_every_block_has_a_function_and_is_filled(document: Document) -> None:
    blocks = blocks_in(document.path.read_text(encoding="utf-8"))
    assert set(blocks) == {*document.quick, *document.slow}
    assert all(blocks.values())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.path.stem)
def test_links_lead_somewhere_and_figures_are_small(document: Document) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.path.read_text(encoding="utf-8"))
    files = [document.path.parent / link for link in links if not link.startswith("http")]
    assert all(file.is_file() for file in files), [file for file in files if not file.is_file()]
    assert all(file.stat().st_size < 150_000 for file in files if file.suffix == ".png")


def test_every_schedule_has_its_picture_on_the_page() -> None:
    page = (DOCS / "concepts" / "schedules.md").read_text(encoding="utf-8")
    for contender in PICTURED:
        assert f"](../figures/{file_name(contender)})" in page
        assert f"### `{contender.name}`" in page


def test_the_command_needs_no_torch() -> None:
    code = "import sys, recipes.paper.pages; print([name for name in ('torch', 'lightning') if name in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
