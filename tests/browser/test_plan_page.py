"""The page of a plan in a browser: layouts are named where they are pointed at, and the table sorts."""

from pathlib import Path

import pytest

from lightning_hanayo.plotting.layouts import Dot
from lightning_hanayo.plotting.pages import save_layouts_page
from tests.browser.chromium import Page

DOTS = [Dot(1.0 + 0.1 * number, 40e9 - 3e9 * number, f"layout {number}") for number in range(10)]
ROWS = [["1", "1.0 s", "40 GB"], ["2", "1.2 s", "9 GB"], ["3", "1.4 s", "28 GB"]]


@pytest.fixture
def plan(page: Page, tmp_path: Path) -> Page:
    path = tmp_path / "plan.html"
    columns = ["#", "step", "memory"]
    save_layouts_page(path, DOTS, DOTS[:6:2], limit=80e9, title="a plan", columns=columns, rows=ROWS)
    page.resize(1400)
    page.open(path)
    return page


def column(page: Page, number: int) -> list[str]:
    cells: list[str] = page.value(
        f"[...document.querySelectorAll('tbody tr')].map(row => row.children[{number}].innerText)"
    )
    return cells


def said(page: Page) -> str:
    return str(page.value("document.getElementById('tip').innerText"))


@pytest.mark.parametrize("width", [1400, 420])
def test_it_fits_the_window(plan: Page, width: int) -> None:
    plan.resize(width)
    assert plan.value("document.documentElement.scrollWidth <= innerWidth")
    assert plan.value("document.querySelectorAll('.dot').length") == 3


def test_what_is_pointed_at_is_named(plan: Page) -> None:
    plan.point_at(".dot[data-index='1']")
    assert "#2 of the table" in said(plan) and "layout 2" in said(plan)
    assert plan.value("document.querySelector('tr.lit').dataset.index") == "1"
    x, y = plan.value("(b => place(data.dots[7]).map((v, i) => v + (i ? b.y : b.x)))(svg.getBoundingClientRect())")
    plan.move(x, y)
    assert said(plan).startswith("layout 7") and "of the table" not in said(plan)
    plan.point_at("h1")
    assert said(plan) == ""


def test_a_row_shows_its_layout(plan: Page) -> None:
    plan.point_at("tbody tr[data-index='2']")
    assert plan.value("document.querySelectorAll('.ring').length") == 1


def test_the_table_sorts_by_any_column_both_ways(plan: Page) -> None:
    plan.click("th:nth-child(3)")
    assert column(plan, 2) == ["9 GB", "28 GB", "40 GB"]
    plan.click("th:nth-child(3)")
    assert column(plan, 2) == ["40 GB", "28 GB", "9 GB"]
    plan.click("th:nth-child(1)")
    assert column(plan, 0) == ["1", "2", "3"]
