"""Two micro-batches at once: cubes train as without pairs, and all of their ranks start collectives in one order."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule
from torch import Tensor

from lightning_hanayo import chunk_loss
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.overlap.link_queue import LinkQueue
from lightning_hanayo.overlap.turns import DeviceTurns
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_bit_equal,
    assert_close,
    make_loader,
    make_strategy,
    make_trainer,
    own_weights,
)

STEPS = 4
LAYOUTS = (
    Layout(1, "auto", 1, "auto", cube=(1, 2, 1)),  # type: ignore[arg-type]
    Layout(1, "auto", 1, "auto", cube=(2, 1, 1)),  # type: ignore[arg-type]
    Layout(2, 1, 1, "hanayo", cube=(1, 2, 1)),
    Layout(2, 1, 1, "hanayo-zb", cube=(2, 1, 1)),
    Layout(2, 1, 1, "1f1b", cube=(1, 1, 2)),
)


def noisy() -> LightningModule:
    """GPT-2 with dropout: its random numbers don't depend on what else runs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=models.VOCABULARY, n_positions=32, n_embd=16, n_layer=4, n_head=2,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return models.HuggingFace(GPT2LMHeadModel(config))


def chunked() -> LightningModule:
    """Its loss would start collectives in a step, if the cube's ranks shared its tokens."""
    module = models.llama(2, 2)
    chunk_loss(module.model)
    return module


MODELS: dict[str, Callable[[], LightningModule]] = {
    "llama": partial(models.llama, 2, 2, 4),
    "gpt2": partial(models.gpt2, 2, 4),
    "noisy": noisy,
    "chunked": chunked,
}
CASES = [(kind, layout) for kind in ("llama", "gpt2", "noisy") for layout in LAYOUTS]
COVERED = [("gpt2", LAYOUTS[3])]


def _padded_now_and_then(count: int) -> list[models.Batch]:
    """The first batches have padding, of the later ones only some."""
    batches = models.padded((8,) * count)
    for batch, whole in list(zip(batches, models.texts((8,) * count), strict=True))[STEPS - 2 :: 2]:
        batch |= whole | {"attention_mask": torch.ones_like(batch["attention_mask"])}
    return batches


class Seen:
    """What a rank did: pairs, and by pair the slots of the actions that started collectives, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[list[int]] = []
        run, start = DeviceTurns.run, LinkQueue.start
        in_pair: list[bool] = []

        def run_pair(turns: DeviceTurns, *actions: Any) -> Any:
            self.started.append([])
            in_pair.append(True)
            try:
                return run(turns, *actions)
            finally:
                in_pair.pop()

        def start_collective(queue: LinkQueue, post: Any) -> Any:
            if in_pair:
                self.started[-1].append(queue.turns.slot)
            return start(queue, post)

        monkeypatch.setattr(DeviceTurns, "run", run_pair)
        monkeypatch.setattr(LinkQueue, "start", start_collective)


def train(
    kind: str,
    layout: Layout,
    pairs: bool,
    options: dict[str, Any],
    batches: Any = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[dict[str, Tensor], list[list[int]]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = Seen(monkeypatch)
        module = models.build(MODELS[kind], torch.float64)
        batches = models.texts((8,) * STEPS) if batches is None else batches()
        strategy = make_strategy(replace(layout, pairs=pairs), loss_weight="tokens", **options)
        trainer = make_trainer(layout, max_epochs=1, strategy=strategy, callbacks=list(callbacks))
        trainer.fit(module, make_loader([_double(batch) for batch in batches]))
        return own_weights(module), seen.started


def _double(batch: Any) -> Any:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


@pytest.mark.parametrize(("kind", "layout"), covered(CASES, by=COVERED), ids=str)
def test_pairs_train_as_one_by_one(pool: Pool, kind: str, layout: Layout) -> None:
    alone = pool.run(layout.world_size, train, kind, layout, False, {})
    paired = pool.run(layout.world_size, train, kind, layout, True, {})
    for (expected, _), (weights, _) in zip(alone, paired, strict=True):
        if layout.schedule == "hanayo-zb":  # in pairs it may cut other backwards in two
            assert_close(weights, expected, 1e-13)
        else:
            assert_bit_equal(weights, expected)
    cube = layout.world_size // layout.pipe
    for first in range(0, layout.world_size, cube):
        orders = [started for _, started in paired[first : first + cube]]
        assert {0, 1} == set(sum(orders[0], [])), "actions ran at once, and both started collectives"
        assert all(order == orders[0] for order in orders)


UNEVEN: dict[str, tuple[Layout, dict[str, Any], Any]] = {
    "masks on some ranks": (
        Layout(1, "auto", 1, "auto", 3, cube=(2, 1, 2)),  # type: ignore[arg-type]
        {},
        partial(models.padded, (12,) * (STEPS + 1)),
    ),
    "masks in some batches": (
        Layout(1, "auto", 1, "auto", 2, cube=(1, 1, 2)),  # type: ignore[arg-type]
        {},
        partial(_padded_now_and_then, STEPS + 2),
    ),
    "shares of several sizes": (
        Layout(1, "auto", 1, "auto", 2, cube=(2, 1, 2)),  # type: ignore[arg-type]
        {},
        partial(models.texts, (10,) * STEPS),
    ),
    "fewer rows than pieces": (
        Layout(1, "auto", 1, "auto", 2, cube=(2, 2, 1), outside="replicate"),  # type: ignore[arg-type]
        {"cube_pieces": 2},
        partial(models.texts, (6,) * STEPS),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", covered(UNEVEN, by=["masks in some batches"]))
def test_ranks_start_the_same_collectives_whatever_their_samples_need(pool: Pool, name: str) -> None:
    """Ranks with other samples have a mask or none, tensors as long as their samples or not, more rows or fewer."""
    layout, options, batches = UNEVEN[name]
    alone = pool.run(layout.world_size, train, "llama", layout, False, options, batches)
    paired = pool.run(layout.world_size, train, "llama", layout, True, options, batches)
    for (expected, _), (weights, started) in zip(alone, paired, strict=True):
        assert_bit_equal(weights, expected)
        assert started and started == paired[0][1]


class Thaws(Callback):
    """Trains the second half of the blocks at first, then all, then the first half."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        layers = module.model.model.layers
        for place, layer in enumerate(layers):
            is_late = 2 * place >= len(layers)
            layer.requires_grad_((is_late, True, not is_late)[batch_idx // STEPS])


@pytest.mark.thorough
def test_parameters_that_are_trained_may_change(pool: Pool) -> None:
    """A frozen weight's gradient needs no collectives."""
    layout, batches = LAYOUTS[1], partial(models.texts, (8,) * (3 * STEPS))
    alone, paired = (
        pool.run(layout.world_size, train, "llama", layout, pairs, {}, batches, [Thaws()]) for pairs in (False, True)
    )
    for (expected, _), (weights, started) in zip(alone, paired, strict=True):
        assert_bit_equal(weights, expected)
        assert started


@pytest.mark.thorough
def test_losses_share_no_tokens_while_another_micro_batch_runs(pool: Pool) -> None:
    layout = replace(LAYOUTS[2], outside="replicate")
    alone, paired = (pool.run(4, train, "chunked", layout, pairs, {}) for pairs in (False, True))
    for (expected, _), (weights, started) in zip(alone, paired, strict=True):
        assert_close(weights, expected, 1e-12)
        assert started


def train_again(layout: Layout) -> list[int]:
    """How many pairs ran, in each of two runs of one module."""
    counts = []
    module = models.build(MODELS["llama"], torch.float64)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as monkeypatch:
            seen = Seen(monkeypatch)
            strategy = make_strategy(replace(layout, pairs=True), loss_weight="tokens")
            trainer = make_trainer(layout, max_epochs=1, strategy=strategy)
            trainer.fit(module, make_loader(models.texts((8,) * STEPS)))
            counts.append(len(seen.started))
    return counts


@pytest.mark.thorough
def test_a_second_run_of_a_module_runs_pairs_too(pool: Pool) -> None:
    for first, second in pool.run(2, train_again, LAYOUTS[1]):
        assert first == second > 0


class Fails(Callback):
    """Fails in a forward that runs at once with a backward: of the second micro-batch, in the last batch."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        step, calls = module.training_step, []

        def failing(batch: Any, *arguments: Any) -> Any:
            calls.append(batch)
            if len(calls) > STEPS * 4 - 3:
                raise ValueError("the user's own error")
            return step(batch, *arguments)

        module.training_step = failing


def train_and_fail(layout: Layout) -> None:
    module = models.build(MODELS["llama"], torch.float64)
    strategy = make_strategy(replace(layout, pairs=True), loss_weight="tokens")
    trainer = make_trainer(layout, max_epochs=1, strategy=strategy, callbacks=[Fails()])
    trainer.fit(module, make_loader(models.texts((8,) * STEPS)))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", covered(LAYOUTS[:3:2], by=LAYOUTS[:1]), ids=str)
def test_an_error_in_a_pair_ends_all_ranks_and_is_named(pool: Pool, layout: Layout) -> None:
    with pytest.raises(RunFailed, match="the user's own error"):
        pool.run(layout.world_size, train_and_fail, layout)


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


def train_without_a_cube(layout: Layout) -> tuple[dict[str, Tensor], list[str]]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lightning_hanayo.strategy.setup.plan.rank_zero_info", said.append)
        module = models.build(models.MLP)
        trainer = make_trainer(layout, max_epochs=1, strategy=make_strategy(layout))
        trainer.fit(module, make_loader(models.vectors((8,) * 3)))
    return own_weights(module), [line for line in said if "pairs" in line]


def test_without_a_cube_they_do_nothing_and_rank_0_says_so(pool: Pool) -> None:
    layout = Layout(2, 1, 1)
    alone = pool.run(2, train_without_a_cube, layout)
    paired = pool.run(2, train_without_a_cube, replace(layout, pairs=True))
    for (expected, nothing), (weights, said) in zip(alone, paired, strict=True):
        assert_bit_equal(weights, expected)
        assert not nothing and ["without a cube" in line for line in said] == [True]
