"""The page of expected step times has the tables that the command makes, from counts that still hold."""

import pytest

from recipes.cube.meshes import TransformerLayer
from recipes.h100.counts import count_block
from recipes.h100.models import MODELS
from recipes.h100.page import CASES, CUBES, PAGE, block_name, counts_of, counts_table, mesh_of, table
from recipes.h100.step import RATES, Step
from recipes.paper.page import blocks_in

TEXT = PAGE.read_text(encoding="utf-8")
AGAIN = "run python -m recipes.h100"


def test_the_table_of_counts_is_as_made() -> None:
    assert blocks_in(TEXT)["counts"] == counts_table(), AGAIN
    assert set(blocks_in(TEXT)) == {"counts", *(block_name(*case) for case in CASES)}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.thorough) for case in CASES], ids=str)
def test_a_table_is_as_made(case: tuple[str, int, int]) -> None:
    assert blocks_in(TEXT)[block_name(*case)] == table(*case), AGAIN


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_block_still_makes_about_as_many_calls(ranks: int) -> None:
    """Another version of torch or transformers may make a few more."""
    mesh = mesh_of(MODELS["7B"], ranks)
    found, written = count_block(MODELS["7B"], mesh, mesh[0]), counts_of("7B", mesh)
    for now, then in ((found.forward, written.forward), (found.backward, written.backward)):
        assert now.calls == pytest.approx(then.calls, rel=0.15), AGAIN
        assert (now.collectives, now.flops) == (then.collectives, then.flops), AGAIN
        assert now.received == pytest.approx(then.received, rel=0.02), AGAIN


@pytest.mark.parametrize("ranks", CUBES[1:])
def test_collectives_bring_what_the_formulas_say(ranks: int) -> None:
    """And a few sums of norms. The page's layers have a gate, whose input is gathered once, with that of `up`."""
    model = MODELS["7B"]
    mesh, counted = mesh_of(model, ranks), counts_of("7B", mesh_of(model, ranks))
    layer = TransformerLayer(mesh[0] * model.length, model.hidden, model.heads, model.features / model.hidden)
    volume, gate = layer.volume(mesh), layer.linears[2].volume(mesh)
    assert counted.forward.received == pytest.approx(2 * (volume.forward + gate.scatter_y), rel=0.01)
    assert counted.backward.received == pytest.approx(2 * (volume.backward + gate.gather_dy), rel=0.01)


def test_products_are_those_of_the_parameters() -> None:
    for name, model in MODELS.items():
        one = counts_of(name, (1, 1, 1))
        attention = 4 * model.length**2 * model.hidden
        assert one.forward.flops == 2 * model.block_parameters * model.length + attention
    assert MODELS["7B"].parameters == pytest.approx(6.74e9, rel=0.01)
    assert MODELS["70B"].parameters == pytest.approx(69e9, rel=0.01)


def test_a_step_takes_its_products_at_least() -> None:
    """On one pipeline rank there is no bubble, and products are those of the blocks and of the head."""
    step = Step(MODELS["7B"], 1, 1, (1, 1, 1), 1, 2, counts_of("7B", (1, 1, 1)))
    one = step.counts.forward.flops + step.counts.backward.flops
    products = 2 * (32 * one + 4096 * MODELS["7B"].head_flops) / (RATES.flops * RATES.flops_share)
    assert step.timeline.makespan == pytest.approx(products)
    assert step.timeline.makespan < step.seconds
    assert step.host_share < 1 and not step.fits
