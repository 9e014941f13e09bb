"""The page of a schedule in a browser: it opens fitted, explains what is pointed at, follows micro-batches, zooms."""

from pathlib import Path

import pytest

from lightning_hanayo.plotting import save_page
from lightning_hanayo.schedule import CostModel, build, simulate
from tests.browser.chromium import Page

RANKS, MICROBATCHES = 4, 16


@pytest.fixture
def wave(page: Page, tmp_path: Path) -> Page:
    schedule = build("hanayo", num_ranks=RANKS, num_microbatches=MICROBATCHES, num_waves=2)
    path = tmp_path / "wave.html"
    save_page(path, "a wave", {"hanayo": simulate(schedule, CostModel(message=0.1))}, unit="T_F")
    page.resize(1400)
    page.open(path)
    return page


def is_fitted(page: Page) -> bool:
    """Whether nothing has to be scrolled sideways, and the timeline takes all of the width."""
    inside, outside = page.value("(s => [s.scrollWidth, s.clientWidth])(document.querySelector('.scroll'))")
    drawn = page.value("document.querySelector('.scroll svg').getBoundingClientRect().width")
    return (
        page.value("document.documentElement.scrollWidth <= innerWidth")
        and inside <= outside
        and drawn > 0.98 * outside
    )


@pytest.mark.parametrize("width", [1400, 420])
def test_it_opens_fitted_and_stays_so(wave: Page, width: int) -> None:
    assert is_fitted(wave)
    wave.resize(width)
    wave.value("new Promise(requestAnimationFrame)")
    assert is_fitted(wave)


def test_what_is_pointed_at_is_explained_and_its_micro_batch_followed(wave: Page) -> None:
    assert wave.value("getComputedStyle(document.getElementById('tip')).display") == "none"
    wave.point_at(".span[data-index='40']")
    rank, stage, kind, microbatch = wave.value("data.timelines[0].spans[40]")[:4]
    said = wave.value("document.getElementById('tip').innerText")
    assert said.startswith(f"{stage}{kind}{microbatch}")
    assert f"rank {rank}, stage {stage}, micro-batch {microbatch}" in said
    own = wave.value(f"data.timelines[0].spans.filter(span => span[3] === {microbatch}).length")
    assert wave.value("document.querySelectorAll('.lit').length") == own == 2 * 4 * RANKS
    assert wave.value("document.querySelectorAll('polyline.path').length") == 1
    wave.point_at("h1")
    assert wave.value("document.querySelectorAll('.lit, .path').length") == 0


def test_activations_are_read_off(wave: Page) -> None:
    wave.point_at(".scroll svg > path:last-child")
    assert "of activations" in wave.value("document.getElementById('tip').innerText")


def test_it_zooms_and_fits_again(wave: Page) -> None:
    width = "document.querySelector('.scroll svg').getBoundingClientRect().width"
    before = wave.value(width)
    wave.click("#in")
    assert wave.value(width) == pytest.approx(1.5 * before, rel=0.01)
    assert not is_fitted(wave)
    wave.click("#out")
    assert wave.value(width) == pytest.approx(before, rel=0.01)
    wave.click("#in")
    wave.click("#fit")
    assert is_fitted(wave)


def test_the_reader_chooses_what_is_drawn(page: Page, tmp_path: Path) -> None:
    sizes = [(2, 4), (2, 8), (4, 4)]
    drawn = {
        f"P={ranks} B={batches}": simulate(build("gpipe", num_ranks=ranks, num_microbatches=batches))
        for ranks, batches in sizes
    }
    always = simulate(build("1f1b", num_ranks=2, num_microbatches=2))
    choices = {"P": ["2", "2", "4", None], "B": ["4", "8", "4", None]}
    save_page(tmp_path / "choose.html", "choose", drawn | {"always": always}, choices=choices)
    page.resize(1400)
    page.open(tmp_path / "choose.html")
    shown = "[...document.querySelectorAll('h2')].map(one => one.firstChild.textContent)"
    choose = "(one => {{ one.value = '{}'; one.onchange(); }})(document.querySelectorAll('select')[{}])"
    assert page.value("[...document.querySelectorAll('select')].map(one => one.length)") == [2, 2]
    page.value(choose.format(2, 0))
    page.value(choose.format(8, 1))
    assert page.value(shown) == ["P=2 B=8", "always"]
    page.value(choose.format(4, 1))
    assert page.value(shown) == ["P=2 B=4", "always"]
    assert is_fitted(page)
