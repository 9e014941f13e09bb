"""Links between the pages lead to files and headings that exist, and the README begins with its two commands."""

import re
from pathlib import Path

import pytest

from tests.test_words import ROOT, documents


def headings(page: Path) -> set[str]:
    """The anchors of a page, made as GitHub makes them: `## Not yet` -> not-yet."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not link.startswith("http"):
            assert target.exists(), f"{link}: no such file"
            assert not anchor or anchor in headings(target), f"{link}: no such heading"


def test_the_readme_begins_with_two_commands_of_one_line() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    run, check = blocks[:2]
    assert run.count("\n") == check.count("\n") == 1
    assert run.endswith("hanayo fit --config recipes/gpt/wave.yaml\n") and check.endswith("tox --current-env\n")
