"""The tables of the worked plans are what `hanayo plan` says now; which rows they show."""

from pathlib import Path
from typing import Any

import pytest

from recipes.paper.page import blocks_in
from recipes.plans.page import CASES, PAGE, chosen, tables


@pytest.mark.thorough
def test_the_tables_are_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tables(tmp_path / "plan.png") == blocks_in(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_all_tables() -> None:
    assert blocks_in(PAGE.read_text(encoding="utf-8")).keys() == {*CASES, "plan-memory"}


def test_the_fastest_the_others_and_the_smallest_are_shown() -> None:
    def layout(pipe: int, mesh: list[int], total: float) -> dict[str, Any]:
        return {"pipe": pipe, "mesh": mesh, "memory": {"total": total}}

    fastest, other, third = layout(2, [1, 1, 1], 9), layout(1, [2, 1, 1], 7), layout(1, [1, 2, 1], 6)
    fourth, fifth = layout(4, [1, 1, 1], 8), layout(8, [1, 1, 1], 5)
    assert chosen([fastest, other, third, fourth, fifth]) == [fastest, other, third, fifth]
    assert chosen([fastest, other]) == [fastest, other]
