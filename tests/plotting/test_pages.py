"""The HTML page is self-contained, and its data is the timeline."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting import pages, save_page
from lightning_hanayo.plotting.layouts import Dot
from lightning_hanayo.plotting.pages import save_layouts_page
from lightning_hanayo.schedule import Action, CostModel, Schedule, Span, Timeline, build, simulate
from tests.schedule.samples import schedules, unhurried

EMPTY = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Parses a page; every tag must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [str(value) for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in EMPTY:
            self.open.append(dict(attrs).get("type") or tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() in (tag, "application/json")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert not reader.open
    return reader


def data(path: Path) -> Any:
    return json.loads(read(path).texts["application/json"])


@pytest.fixture
def wave(tmp_path: Path) -> Path:
    timeline = simulate(build("hanayo", num_ranks=4, num_microbatches=4), CostModel(message=0.1, gradient_reduce=0.5))
    save_page(tmp_path / "wave.html", "a wave & more", {"hanayo": timeline}, unit="T_F")
    return tmp_path / "wave.html"


def test_page_refers_to_nothing_outside(wave: Path) -> None:
    reader = read(wave)
    assert reader.references == []
    assert not reader.tags & {"link", "img", "iframe", "object", "embed"}
    text = wave.read_text().replace("http://www.w3.org/2000/svg", "", 1)  # an XML name, which is never fetched
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)


def test_title_is_escaped(wave: Path) -> None:
    assert "<h1>a wave &amp; more</h1>" in wave.read_text()


def test_data_cannot_end_the_script_element(tmp_path: Path) -> None:
    save_page(tmp_path / "odd.html", "odd", {"</script><b>": simulate(build("gpipe", num_ranks=1, num_microbatches=1))})
    assert data(tmp_path / "odd.html")["timelines"][0]["name"] == "</script><b>"


@unhurried
@given(schedule=schedules(max_ranks=3, max_microbatches=4))
def test_data_is_the_timeline(schedule: Schedule, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "page.html"
    timeline = simulate(schedule, CostModel(message=0.25), steps=2)
    save_page(path, "it", {"it": timeline})
    (shown,) = data(path)["timelines"]
    spans = [(s[0], f"{s[1]}{s[2]}{s[3]}", s[4], s[5]) for s in shown["spans"]]
    drawn = [s for s in timeline.spans if s.end > s.start]
    assert spans == [(s.rank, str(s.action), round(s.start, 9), round(s.end, 9)) for s in drawn]
    curves = [timeline.activations(rank) for rank in range(timeline.num_ranks)]
    assert shown["activations"] == [[[round(time, 9), held] for time, held in curve] for curve in curves]
    assert shown["makespan"] == timeline.makespan
    assert [s[9] for s in shown["spans"]] == sorted(s[9] for s in shown["spans"])


def test_a_span_says_how_long_its_rank_was_idle_and_which_message_it_waited_for(wave: Path) -> None:
    spans = {f"{s[1]}{s[2]}{s[3]}": s for s in data(wave)["timelines"][0]["spans"]}
    assert spans["0F0"][7:9] == [0.0, None]
    assert spans["1F0"][7:9] == [0.6, "0F0 on rank 0"]


def test_a_pair_of_actions_shares_the_row(tmp_path: Path) -> None:
    """From top to bottom."""
    spans = [("0F3", 5.0, 6.0), ("1B1", 5.0, 7.0), ("0F4", 7.0, 8.0)]
    timeline = Timeline(tuple(Span(0, Action.parse(cell), start, end) for cell, start, end in spans))
    save_page(tmp_path / "pair.html", "a pair", {"it": timeline})
    shown = data(tmp_path / "pair.html")["timelines"][0]["spans"]
    assert [span[10] for span in shown] == [[0, 0.5], [0.5, 1], [0, 1]]


def test_every_colour_is_in_the_legend(wave: Path) -> None:
    shown = data(wave)
    used = {span[6] for span in shown["timelines"][0]["spans"]}
    assert used == {colour for _, colour in shown["legend"]}
    assert "gradient reduction" in dict(shown["legend"])


def test_too_many_actions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_SPANS", 7)
    timeline = simulate(build("gpipe", num_ranks=2, num_microbatches=2))
    with pytest.raises(HanayoError, match=r"at most 7 actions, got 8; .* write a trace \(.json\)"):
        save_page(tmp_path / "a.html", "it", {"it": timeline})


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match="can't be written"):
        save_page(tmp_path / "nowhere" / "a.html", "it", {"it": Timeline(())})


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_script_is_valid_javascript(wave: Path, tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(read(wave).texts["script"])
    done = subprocess.run(["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_plan_is_self_contained_and_has_all_layouts_that_are_worth_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    dots = [Dot(seconds, 1e9, name=f"<{seconds}>") for seconds in (1.0, 2.0, 9.0)]
    rows = [["1", "a & b"]]
    save_layouts_page(path, dots, dots[:1], limit=2e9, title="A & B", columns=["#", "name"], rows=rows)
    page = read(path)
    assert not page.references and page.texts["h1"] == "A & B"
    found = data(path)
    assert [name for *_, name in found["dots"]] == ["<1.0>", "<2.0>"], "the third takes nine times as long"
    assert found["count"] == 3 and found["rows"] == rows
