"""A model that was built on the meta device has the same initial values on every layout.

one process       initializes modules 0, 1, 2, 3, ... one after another
pipe 2            each rank initializes the modules of its stages
cube (1, 2, 2)    rank k initializes module k, k + 4, ..., and sends each rank its shard; no rank holds all values
"""

import copy
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hanayo.partition.deferred_init import DeferredInit, DeferredModule
from lightning_hanayo.strategy.setup import build_pipeline
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_bit_equal,
    make_loader,
    make_strategy,
    make_trainer,
    merge_owned,
    own_weights,
    unguarded,
)

Values = dict[str, Tensor]


class DeferredModel(models.Trained):
    """Any model, built in `configure_model`, on the meta device or on the CPU.

    Args:
        kind: a key of `FACTORIES`.
        device: to build it on.
    """

    def __init__(self, kind: str, device: str = "meta") -> None:
        super().__init__()
        self.kind = kind
        self.where = device

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device(self.where):
                self.model: Any = FACTORIES[self.kind]()

    def loss(self, batch: Batch) -> Tensor:
        labels = batch["labels"]
        logits = self.model(batch["input_ids"])
        logits = getattr(logits, "logits", logits)
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=models.IGNORED)


class Recipe(DeferredModel):
    """A recipe's model, whose initial values are set by one method that loops over the whole model."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with self.trainer.init_module(empty_init=self.where == "meta"):
                self.model = FACTORIES[self.kind]()
            del self.model.perplexity

    def reset_parameters(self) -> None:
        self.model._initialize(*[len(self.model.blocks)] * (self.kind == "gpt"))


class Table(nn.Module):
    """A buffer that is computed once and is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(models.WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.copy_(torch.linspace(1, 2, models.WIDTH))


class Scaled(nn.Module):
    """A block with a module that all blocks share."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.table.scale


def shared() -> nn.Module:
    table = Table()
    blocks = [Scaled(table) for _ in range(4)]
    return nn.Sequential(
        nn.Embedding(models.VOCABULARY, models.WIDTH),
        nn.Sequential(*blocks),
        nn.Linear(models.WIDTH, models.VOCABULARY),
    )


def bert_recipe() -> LightningModule:
    from recipes.bert.module import BERT

    return BERT(models.VOCABULARY, 16, 4, models.WIDTH, 4)


def unwrapped(make: Callable[..., Any], *sizes: int) -> nn.Module:
    return make(*sizes).model


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "shared": shared,
    "gpt": partial(models.gpt, 4, 4),
    "bert": bert_recipe,
    "GPT-2": partial(unwrapped, models.gpt2, 4, 4),
    "BERT": partial(unwrapped, models.bert, 4, 4),
    "Llama": partial(unwrapped, models.llama, 4, 4, 4),
}
ALONE = Layout()
LAYOUTS = [
    Layout(2),
    Layout(2, data=2),
    Layout(cube=(2, 1, 1), outside="replicate", num_microbatches=1),
    Layout(cube=(1, 2, 2), num_microbatches=1),
]


def deferred(kind: str, device: str = "meta") -> DeferredModel:
    return (Recipe if kind in ("gpt", "bert") else DeferredModel)(kind, device)


class InitialValues(Callback):
    """The values that this rank holds when training begins."""

    values: Values
    buffers: Values

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session = getattr(trainer.strategy, "session", None)
        cube = session.cube if session is not None else None
        self.values = own_weights(pl_module, trainer)
        self.buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers() if not buffer.is_meta}
        with unguarded(trainer):
            assert cube is None or any(
                p.numel() < self.values[n].numel() for n, p in pl_module.named_parameters() if not p.is_meta
            )


def begin(module: DeferredModel, layout: Layout, **options: Any) -> tuple[InitialValues, Trainer]:
    """Train one step, and return the initial values."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    torch.manual_seed(3)
    initial = InitialValues()
    start = options.pop("start", None)
    strategy = make_strategy(layout, loss_weight="tokens") if module.where == "meta" else "auto"
    trainer = make_trainer(layout, **{"max_steps": 1, "callbacks": [initial], "strategy": strategy} | options)
    trainer.fit(module, make_loader(models.texts((8,))), ckpt_path=start)
    return initial, trainer


def started(layout: Layout) -> dict[str, tuple[Values, Values, float]]:
    """For each kind of model: this rank's initial values and buffers, and the first step's loss."""
    found = {}
    for kind in FACTORIES:
        initial, trainer = begin(deferred(kind), layout)
        module: Any = trainer.lightning_module
        if kind == "GPT-2" and not module.model.lm_head.weight.is_meta:
            assert module.model.lm_head.weight is module.model.transformer.wte.weight
        found[kind] = initial.values, initial.buffers, float(trainer.callback_metrics["train_loss"])
    return found


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, tuple[Values, Values, float]]:
    """The same on a single rank."""
    (found,) = pool.run(1, started, ALONE)
    return found


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=LAYOUTS[:1]), ids=str)
def test_values_are_the_same_on_every_layout(pool: Pool, alone: Any, layout: Layout) -> None:
    ranks = pool.run(layout.world_size, started, layout)
    for kind, (values, buffers, loss) in alone.items():
        for group in layout.topology.groups("pipe"):
            own = [ranks[rank][kind] for rank in group]
            assert_bit_equal(merge_owned([rank[0] for rank in own]), values)
            assert_bit_equal(own[0][1], buffers)
            assert all(rank[1].keys() == buffers.keys() for rank in own if kind == "shared")
        assert [rank[kind][2] for rank in ranks] == pytest.approx([loss] * layout.world_size, rel=1e-5)


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of all storages that are allocated in its context and still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def peaks(layout: Layout) -> dict[str, Any]:
    """For the initialization on this rank: its modules, how many full ones are alive at a time, and its memory."""
    live, names, held, whole = MemoryCounter(), [], [], []
    build, give = DeferredInit.initial_values, build_pipeline.fill_initial_values

    def noted(deferred_init: DeferredInit, module: DeferredModule) -> list[Tensor]:
        held.append(sum(value() is not None for value in whole))
        values = build(deferred_init, module)
        names.append(module.name)
        whole[:] = [weakref.ref(value) for value in values]
        sizes.append(sum(value.nbytes for value in values))
        return values

    def measured(*arguments: Any) -> None:
        with live:
            give(*arguments)

    sizes: list[int] = []
    DeferredInit.initial_values, build_pipeline.fill_initial_values = noted, measured  # type: ignore[method-assign]
    try:
        begin(deferred("GPT-2"), layout)
    finally:
        DeferredInit.initial_values, build_pipeline.fill_initial_values = build, give  # type: ignore[method-assign]
    return {"names": names, "held": held, "sizes": sizes, "peak": live.peak, "kept": live.bytes}


def test_no_rank_holds_more_than_one_full_module_in_addition_to_its_shards(pool: Pool) -> None:
    """A full module, and its shards in memory of their own: twice the largest module at most."""
    ranks = pool.run(4, peaks, Layout(cube=(1, 2, 2), num_microbatches=1))
    total, largest = sum(ranks[0]["sizes"]), max(ranks[0]["sizes"])
    for rank in ranks:
        assert len(rank["names"]) == len(set(rank["names"])) == 3 + 4 * 6
        assert not any(rank["held"])
        assert rank["kept"] < 0.4 * total  # a quarter, replicated vectors, and indices
        assert rank["peak"] <= rank["kept"] + 2 * largest < 0.6 * total


def saved(path: Path) -> Values:
    _, trainer = begin(deferred("Llama", "cpu"), ALONE, max_steps=2)
    trainer.save_checkpoint(path)
    return own_weights(trainer.lightning_module)


def resumed(path: Path, layout: Layout) -> Values:
    return begin(deferred("Llama"), layout, max_steps=3, start=path)[0].values


@pytest.mark.parametrize("layout", [ALONE, Layout(2, cube=(1, 2, 1))], ids=str)
def test_values_of_a_checkpoint_replace_the_initial_ones(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    (expected,) = pool.run(1, saved, tmp_path / "run.ckpt")
    ranks = pool.run(layout.world_size, resumed, tmp_path / "run.ckpt", layout)
    for group in layout.topology.groups("pipe"):
        assert_bit_equal(merge_owned([ranks[rank] for rank in group]), expected)


class Special(models.MLP):
    """Sets values in its constructor, which can't be repeated."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()
            nn.init.zeros_(self.blocks[5].up.weight)


def refused(model: Callable[[], LightningModule], *layouts: Layout) -> None:
    module = model()
    for layout in layouts:
        make_trainer(layout, max_steps=1).fit(module, make_loader(models.vectors((8,))))
        module = copy.deepcopy(module)


def test_values_that_would_be_lost_are_refused(pool: Pool) -> None:
    """Values that a constructor has set, and those of a copy that other ranks have trained."""
    with pytest.raises(RunFailed, match=r"blocks\.5\.up\.weight of a Linear was given values 2 times"):
        pool.run(2, refused, Special, Layout(2))
    with pytest.raises(RunFailed, match=r"to which a hook or a layout moves it"):
        pool.run(2, refused, models.MLP, Layout(2), Layout(2, waves=2))
