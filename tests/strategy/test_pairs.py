"""Two micro-batches at once: cubes train as without pairs, and all of their ranks start collectives in one order."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.overlap.link_queue import LinkQueue
from lightning_hanayo.overlap.turns import DeviceTurns
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, assert_bit_equal, make_loader, make_strategy, make_trainer, own_weights

STEPS = 4
"""batches by turns, recorded, and two by the plan"""
LAYOUTS = (
    Layout(1, "auto", 1, "auto", cube=(1, 2, 1)),  # type: ignore[arg-type]
    Layout(1, "auto", 1, "auto", cube=(2, 1, 1)),  # type: ignore[arg-type]
    Layout(2, 1, 1, "hanayo", cube=(1, 2, 1)),
    Layout(2, 1, 1, "hanayo-zb", cube=(2, 1, 1)),
    Layout(2, 1, 1, "1f1b", cube=(1, 1, 2)),
)
MODELS = {"llama": partial(models.llama, 2, 2), "gpt2": models.gpt2}


class Seen:
    """What a rank did: pairs, and the collectives of each, in the order in which the link carried them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pairs = self.planned = 0
        self.carried: list[tuple[int, int]] = []
        run, put = DeviceTurns.run, LinkQueue._put

        def run_pair(turns: DeviceTurns, *actions: Any, by_turns: bool = True, prefer: int | None = None) -> Any:
            self.pairs += 1
            self.planned += not by_turns
            return run(turns, *actions, by_turns=by_turns, prefer=prefer)

        def put_ticket(queue: LinkQueue, ticket: Any) -> None:
            if queue.turns.is_pair:
                self.carried.append((self.pairs, ticket.number))
            put(queue, ticket)

        monkeypatch.setattr(DeviceTurns, "run", run_pair)
        monkeypatch.setattr(LinkQueue, "_put", put_ticket)


def train(kind: str, layout: Layout, pairs: bool, options: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = Seen(monkeypatch)
        module = models.build(MODELS[kind], torch.float64)
        batches = models.texts((8,) * STEPS)
        strategy = make_strategy(replace(layout, pairs=pairs), loss_weight="tokens", **options)
        trainer = make_trainer(layout, max_epochs=1, strategy=strategy)
        trainer.fit(module, make_loader([_double(batch) for batch in batches]))
        return own_weights(module), (seen.pairs, seen.planned, seen.carried)


def _double(batch: Any) -> Any:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_pairs_train_bit_for_bit_as_one_by_one(pool: Pool, kind: str, layout: Layout) -> None:
    alone = pool.run(layout.world_size, train, kind, layout, False, {})
    paired = pool.run(layout.world_size, train, kind, layout, True, {})
    for (expected, _), (weights, _) in zip(alone, paired, strict=True):
        assert_bit_equal(weights, expected)
    figures = [seen for _, seen in paired]
    assert all(pairs and planned for pairs, planned, _ in figures), "actions ran at once, in a planned order"
    cube = layout.world_size // layout.pipe
    for first in range(0, layout.world_size, cube):
        orders = [carried for _, _, carried in figures[first : first + cube]]
        assert orders[0] and all(order == orders[0] for order in orders)


def test_what_pairs_may_be() -> None:
    with pytest.raises(HanayoError, match="pairs='yes': expected True or False"):
        make_strategy(LAYOUTS[0], pairs="yes")


REFUSED: tuple[tuple[Any, dict[str, Any], str], ...] = (
    (models.MLP, {}, "Block is no registered block"),
    (MODELS["llama"], {"cube_outside": "tokens"}, "user code would start collectives"),
    (MODELS["llama"], {"recompute": "blocks"}, "run blocks again while another micro-batch runs them"),
)


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED)
def test_what_two_micro_batches_cannot_share_is_refused_before_processes_start(
    kind: Any, options: dict[str, Any], words: str
) -> None:
    strategy = make_strategy(LAYOUTS[2], pairs=True, **options)
    trainer = make_trainer(LAYOUTS[2], max_epochs=1, strategy=strategy)
    with pytest.raises(HanayoError, match=words):
        trainer.fit(models.build(kind), make_loader(models.texts((8,))))
