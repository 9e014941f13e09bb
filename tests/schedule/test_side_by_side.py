"""The table of schedules side by side, in docs/concepts/schedules.md, is what the simulator says."""

from pathlib import Path
from typing import Any

import pytest

from lightning_hanayo.schedule import build, complete, simulate

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "schedules.md"
OPTIONS: dict[str, dict[str, Any]] = {
    "4 stages per rank": {"num_stages_per_rank": 4},
    "W = 2": {"num_waves": 2},
    "in 0.75 P": {"activation_budget": 3},
}


def rows() -> list[list[str]]:
    lines = PAGE.read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| P = 4, F = I = W"))
    table = [line for line in lines[start + 2 : start + 20] if line.startswith("|")]
    return [[cell.strip().strip("*").strip() for cell in line.strip("|").split("|")] for line in table]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_is_as_simulated(row: list[str]) -> None:
    label, bubbles, peak, messages = row[0], row[1:5], row[5], row[6]
    name, *options = (part.strip() for part in label.replace("`", "").split(","))
    asked = {key: value for option in options for key, value in OPTIONS[option].items()}
    columns = list(zip((1, 2, 4, 8), bubbles, strict=True))
    for times, bubble in columns[: 2 if "activation_budget" in asked else 4]:  # a search takes seconds
        schedule = build(name, num_ranks=4, num_microbatches=4 * times, **asked)
        timeline = simulate(schedule)
        assert f"{100 * timeline.bubble_ratio:.1f} %" == bubble
        symbols = {"B": 4.0 * times, "P": 4.0, "0.75 P": 3.0}
        if peak in symbols or times == 8:
            assert max(timeline.peak_activations) == (symbols[peak] if peak in symbols else float(peak))
    sends = sum(action.kind.startswith("SEND") for actions in complete(schedule) for action in actions)
    assert sends == int(messages) * schedule.num_microbatches


def test_the_table_names_the_schedules() -> None:
    assert len(rows()) == 9
