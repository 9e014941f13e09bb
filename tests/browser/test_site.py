"""The documentation in a browser: pages fit narrow windows, and its search finds words and opens pages."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.chromium import Page
from tests.test_words import ROOT

PAGES = ("index.html", "start.html", "concepts/cube.html", "guides/plan.html", "benchmarks/pairs-tables.html")

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs Sphinx: pip install -e '.[docs]'"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "sphinx", "--quiet", ROOT / "docs", folder], check=True)
    return folder


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("name", PAGES)
def test_no_page_scrolls_sideways(page: Page, site: Path, name: str, width: int) -> None:
    assert (site / name).is_file()
    page.resize(width)
    page.open(site / name)
    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "tables and pictures scroll by themselves"


def test_every_picture_is_shown(page: Page, site: Path) -> None:
    for name in PAGES:
        page.open(site / name)
        assert page.value("[...document.images].filter(one => !one.naturalWidth).map(one => one.src)") == []


def test_the_search_finds_a_page_and_opens_it(page: Page, site: Path) -> None:
    page.resize(1400)
    page.open(f"{(site / 'search.html').as_uri()}?q=micro-batch")
    page.value(
        "new Promise(done => { const look = () => document.querySelector('#search-results li a') ? done()"
        " : setTimeout(look, 50); look(); })"
    )
    found = page.value("document.querySelector('#search-results li a').getAttribute('href')")
    page.click("#search-results li a")
    page.value("new Promise(done => setTimeout(done, 500))")
    assert found.partition("?")[0].partition("#")[0] in page.value("location.href")
