"""Traces follow the Chrome trace event format and contain the whole timeline."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting import chrome_trace, save_trace
from lightning_hanayo.plotting.timeline import timeline_messages
from lightning_hanayo.schedule import Action, CostModel, Schedule, Span, Timeline, build, simulate
from tests.schedule.samples import schedules, unhurried

Event = dict[str, Any]


def events(timeline: Timeline, phase: str, **options: Any) -> list[Event]:
    return [e for e in chrome_trace({"it": timeline}, **options)["traceEvents"] if e["ph"] == phase]


@unhurried
@given(schedules(pairs=False))
def test_every_slice_is_a_span(schedule: Schedule) -> None:
    timeline = simulate(schedule, CostModel(message=0.25, gradient_reduce=0.5), steps=2)
    slices = events(timeline, "X", seconds=1.0)
    assert len(slices) == len(timeline.spans)
    for event, span in zip(slices, timeline.spans, strict=True):
        assert (event["pid"], event["tid"] // 2, event["name"]) == (0, span.rank, str(span.action))
        assert event["ts"] == pytest.approx(1e6 * span.start, abs=1e-3)
        assert event["dur"] == pytest.approx(1e6 * (span.end - span.start), abs=1e-3)
        assert event["cat"]


@pytest.mark.thorough
@unhurried
@given(schedules())
def test_flows_have_two_ends_and_each_is_inside_a_slice(schedule: Schedule) -> None:
    timeline = simulate(schedule, CostModel(message=0.25))
    starts, ends = ({e["id"]: e for e in events(timeline, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(list(timeline_messages(timeline)))
    slices = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events(timeline, "X")]
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] < end["ts"]
        assert end["bp"] == "e"
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        for flow in (start, end):
            assert any(s[:2] == (flow["pid"], flow["tid"]) and s[2] <= flow["ts"] <= s[3] for s in slices)


def test_slices_of_one_thread_never_overlap() -> None:
    timeline = simulate(build("hanayo", num_ranks=4, num_microbatches=4), CostModel(gradient_reduce=2.0))
    rows: dict[int, list[Event]] = {}
    for event in events(timeline, "X"):
        rows.setdefault(event["tid"], []).append(event)
    assert len(rows) == 8, "compute and reductions of 4 ranks"
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        assert all(one["ts"] + one["dur"] <= next_["ts"] for one, next_ in zip(row, row[1:], strict=False))


def test_each_rank_has_a_counter_of_its_activations() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2))
    own = [e for e in events(timeline, "C", seconds=1e-6) if e["name"] == "activations, rank 1"]
    assert tuple((e["ts"], e["args"]["M_a"]) for e in own) == timeline.activations(1)


def test_threads_and_processes_have_names() -> None:
    one = simulate(build("1f1b", num_ranks=2, num_microbatches=2))
    trace = chrome_trace({"measured": one, "predicted": one})
    names = [(e["name"], e.get("tid"), e["args"]) for e in trace["traceEvents"] if e["ph"] == "M" and e["pid"] == 1]
    assert ("process_name", None, {"name": "predicted"}) in names
    assert ("thread_name", 2, {"name": "rank 1"}) in names
    flows = Counter(e["id"] for e in trace["traceEvents"] if e["ph"] == "s")
    assert set(flows.values()) == {1}, "of all processes together"


def test_a_measured_timeline_with_its_waits() -> None:
    """In seconds, starting at 7.0; rank 1 waits for the input of 1F0 from the start."""
    measured = Timeline((Span(0, Action.parse("0F0"), 7.0, 7.5), Span(1, Action.parse("1F0"), 7.6, 8.1)))
    waits = {"it": [Span(1, Action.parse("1F0"), 7.0, 7.6)]}
    wait, first, second = events(measured, "X", seconds=1.0, waits=waits)
    assert (wait["name"], wait["cat"], wait["tid"], wait["ts"], wait["dur"]) == ("wait 1F0", "wait", 2, 0.0, 6e5)
    assert (first["ts"], second["ts"]) == (0.0, 6e5)
    assert second["args"] == {"stage": 1, "microbatch": 0, "idle_before_us": 6e5}


def test_a_pair_of_actions_has_two_threads() -> None:
    """On rank 1, 0F3 and 1B1 run at once, and 0F4 has waited since before the end of 1B1."""
    cells = ("0F3", 0.0, 1.0), ("1B1", 0.0, 2.0), ("0F4", 2.5, 3.0)
    timeline = Timeline(tuple(Span(1, Action.parse(cell), start, end) for cell, start, end in cells))
    waits = {"it": [Span(1, Action.parse("0F4"), 1.5, 2.5)]}
    threads = {e["name"]: e["tid"] for e in events(timeline, "X", waits=waits)}
    assert threads == {"0F3": 3, "1B1": 4, "wait 0F4": 3, "0F4": 3}
    names = {e["tid"]: e["args"]["name"] for e in events(timeline, "M", waits=waits) if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 3: "rank 1", 4: "rank 1, at the same time"}


def test_the_file_is_json(tmp_path: Path) -> None:
    timelines = {"it": simulate(build("gpipe", num_ranks=2, num_microbatches=2))}
    save_trace(tmp_path / "trace.json", timelines)
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(chrome_trace(timelines)))
    with pytest.raises(HanayoError, match="can't be written"):
        save_trace(tmp_path / "nowhere" / "trace.json", timelines)


def test_nothing_is_a_trace_too() -> None:
    assert [e["ph"] for e in chrome_trace({"it": Timeline(())})["traceEvents"]] == ["M"]
