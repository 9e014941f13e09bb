"""A plan's file is read back as the strategy's arguments; another file is rejected, with an error that names it."""

from pathlib import Path

import pytest
import yaml

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.machine import machine
from lightning_hanayo.planner.ranking import Plan, load_plan, make_plan, overlay, save_plan, strategy_options
from tests.planner.llamas import SEVEN_B


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(SEVEN_B, machine("h100"), num_devices=16, step=64, top=2)


def test_what_is_saved_is_loaded(plan: Plan, tmp_path: Path) -> None:
    path, first = tmp_path / "plan.yaml", plan.first.candidate
    save_plan(path, plan, overlay(plan, num_nodes=2, accelerator="gpu", sets_batch_size=True))
    assert load_plan(path) == strategy_options(first)
    made = yaml.safe_load(path.read_text())
    assert made["trainer"]["devices"] == 8
    assert made["trainer"]["num_nodes"] == 2
    assert made["trainer"]["accumulate_grad_batches"] == first.accumulate
    assert made["data"]["init_args"]["batch_size"] == first.batch_size
    assert path.read_text().startswith("# hanayo plan: ")


def test_data_without_a_batch_size(plan: Plan) -> None:
    made = overlay(plan, num_nodes=1, accelerator=None, sets_batch_size=False)
    assert list(made) == ["trainer"]
    assert "accelerator" not in made["trainer"]


WRONG = {"empty": "", "list": "[]", "no_strategy": "trainer: {}", "no_sizes": "trainer: {strategy: {init_args: {}}}",
         "no_yaml": "a: [", "text": "trainer: {strategy: hanayo}"}  # fmt: skip


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_no_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(HanayoError, match=r"is no plan: .*; expected the plan\.yaml that hanayo plan writes"):
        load_plan(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match="can't be read"):
        load_plan(tmp_path / "none.yaml")
