"""Callbacks that average weights: each rank averages what it holds, as one process averages the whole model."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_hanayo.dist_checkpointing.compare import folder_content
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    own_weights,
)

LAYOUTS = {
    "one rank": Layout(1, 1, 1),
    "data ranks": Layout(1, 1, 2),
    "pipeline": Layout(2, 1, 1),
    "waves": Layout(2, 2, 1),
    "pipelines": Layout(2, 1, 2),
    "cube": Layout(1, 1, 1, cube=(1, 2, 1)),
    "cube and pipeline": Layout(2, 1, 1, cube=(1, 2, 1)),
}


class Validated(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Late(Validated):
    """Is built in `configure_model`."""

    place = "cpu"

    def __init__(self) -> None:
        super().__init__()
        del self.embedding, self.blocks, self.head

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        torch.manual_seed(0)
        with torch.device(self.place):
            self.embedding = nn.Linear(models.WIDTH, models.WIDTH)
            self.blocks = nn.ModuleList(models.Block() for _ in range(models.NUM_BLOCKS))
            self.head = nn.Linear(models.WIDTH, models.CLASSES)


class Deferred(Late):
    """Has no values until it is cut."""

    place = "meta"


class Normalised(Validated):
    """Has buffers to average, and statistics that are collected anew."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


CALLBACKS: dict[str, Callable[[], Any]] = {
    "moving average": partial(EMAWeightAveraging, decay=0.7),
    "moving average of lists": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    "mean": WeightAveraging,
    "from an epoch on": partial(StochasticWeightAveraging, 0.05, swa_epoch_start=1, annealing_epochs=2),
    "pruning": partial(ModelPruning, "l1_unstructured", amount=0.3, parameter_names=["weight"]),
}


def train(
    name: str,
    layout: Layout | None,
    folder: Path | None = None,
    start: Path | None = None,
    model: Callable[[], Any] = Validated,
    num_runs: int = 1,
    **options: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train four epochs; None: with a plain Trainer. Returns this rank's parameters, and metrics."""
    messages = (
        "many workers",
        "is not empty",
        "to be provided",
        "`lr_scheduler.step",
        "overrides the configure",
        "norm",
    )
    for message in messages:
        warnings.filterwarnings("ignore", message=f".*{message}")
    savers = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else []
    rank, size = (0, 1) if layout is None else (data_rank(layout), layout.data)
    own = [{key: value[rank::size] for key, value in one.items()} for one in models.vectors((8, 8))]
    module, loader = models.build(model), make_loader(own)
    for _ in range(num_runs):
        strategy = {} if layout is None else {"strategy": make_strategy(layout, **options)}
        callbacks = [CALLBACKS[name](), *savers]
        trainer = make_trainer(
            layout or Layout(), callbacks=callbacks, max_epochs=4, enable_checkpointing=bool(savers), **strategy
        )
        trainer.fit(module, loader, loader, ckpt_path=start)
        module.seen += [one["val_loss"] for one in trainer.validate(module, loader, verbose=False)]
    return own_weights(module, trainer), module.seen


def merged(ranks: list[tuple[dict[str, Tensor], list[float]]]) -> tuple[dict[str, Tensor], list[float]]:
    """The parameters of all ranks, which must have the same metrics."""
    assert all(seen == ranks[0][1] for _, seen in ranks)
    return {name: value for weights, _ in ranks for name, value in weights.items()}, ranks[0][1]


CASES = [(name, layout) for name in CALLBACKS for layout in LAYOUTS if name != "pruning"]
FEW = [("moving average", "pipelines"), ("from an epoch on", "pipeline")]


@pytest.mark.parametrize(("name", "layout"), covered(CASES, by=[("moving average", "pipeline")]))
def test_averages_are_those_of_one_process(pool: Pool, name: str, layout: str) -> None:
    ((weights, seen),) = pool.run(1, train, name, None)
    found, found_seen = merged(pool.run(LAYOUTS[layout].world_size, train, name, LAYOUTS[layout]))
    assert found_seen == pytest.approx(seen, rel=1e-5)
    assert_close(found, weights, 1e-6)


def tensors_in(value: Any, path: str = "") -> dict[str, Tensor]:
    """All floating-point tensors of a checkpoint's model and averages."""
    if isinstance(value, Tensor):
        return {path: value.clone()} if value.is_floating_point() and value.dim() else {}
    items = value.items() if isinstance(value, dict) else ()
    return {name: one for key, inner in items for name, one in tensors_in(inner, f"{path}/{key}").items()}


def averages_in(path: Path) -> dict[str, Tensor]:
    content = folder_content(CheckpointFolder(path)) if path.is_dir() else torch.load(path, weights_only=True)
    return tensors_in({key: content.get(key) for key in ("state_dict", "current_model_state", "callbacks")})


SAVES = [
    ("moving average", "pipeline", {}), ("moving average", "cube", {}), ("moving average", "pipelines", {}),
    ("moving average", "pipeline", {"save_full": True}), ("moving average", "cube and pipeline", {"save_full": True}),
    ("from an epoch on", "pipeline", {}), ("from an epoch on", "cube and pipeline", {}),
    ("from an epoch on", "cube and pipeline", {"save_full": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout", "options"), covered(SAVES, by=[("moving average", "pipeline", {})]), ids=str
)
def test_checkpoints_hold_weights_and_averages(
    pool: Pool, tmp_path: Path, name: str, layout: str, options: dict[str, Any]
) -> None:
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    pool.run(1, train, name, None, alone)
    pool.run(LAYOUTS[layout].world_size, partial(train, **options), name, LAYOUTS[layout], apart)
    for saved in ("epoch=0.ckpt", "epoch=2.ckpt"):
        assert_close(averages_in(apart / saved), averages_in(alone / saved), 1e-6)


READERS = ["one rank", "pipeline", "pipelines", "cube", "cube and pipeline"]


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"save_full": True}], ids=["folder", "file"])
@pytest.mark.parametrize("name", ["moving average", "from an epoch on"])
def test_a_run_goes_on_with_its_averages_on_any_layout(
    pool: Pool, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    pool.run(1, train, name, None, tmp_path / "alone")
    pool.run(2, partial(train, **options), name, LAYOUTS["waves"], tmp_path / "waves")
    for saved in ("epoch=0.ckpt", "epoch=2.ckpt"):
        ((weights, seen),) = pool.run(1, train, name, None, None, tmp_path / "alone" / saved)
        for reader in READERS:
            layout = LAYOUTS[reader]
            ranks = pool.run(layout.world_size, train, name, layout, None, tmp_path / "waves" / saved)
            found, found_seen = merged(ranks)
            assert found_seen == pytest.approx(seen, rel=1e-5)
            assert_close(found, weights, 1e-6)


OTHERS = [
    ("moving average", "pipeline", {"model": Late}),
    ("moving average", "pipeline", {"num_runs": 2}),
    ("moving average", "cube and pipeline", {"num_runs": 2}),
    ("from an epoch on", "pipeline", {"num_runs": 2}),
    ("moving average", "whole batches", {"model": Normalised}),
    ("from an epoch on", "whole batches", {"model": Normalised}),
    ("pruning", "one rank", {}),
    ("pruning", "data ranks", {}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "layout", "options"), OTHERS, ids=str)
def test_other_models_and_runs(pool: Pool, name: str, layout: str, options: dict[str, Any]) -> None:
    where = LAYOUTS.get(layout, Layout(2, 1, 1, num_microbatches=1))
    ((weights, seen),) = pool.run(1, partial(train, **options), name, None)
    found, found_seen = merged(pool.run(where.world_size, partial(train, **options), name, where))
    assert found_seen == pytest.approx(seen, rel=1e-4)
    assert_close(found, weights, 1e-4)  # of two runs


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["pipeline", "cube", "cube and pipeline"])
def test_a_model_without_values_takes_those_of_a_checkpoint(pool: Pool, tmp_path: Path, layout: str) -> None:
    pool.run(1, train, "moving average", None, tmp_path, None, Late)
    start = tmp_path / "epoch=1.ckpt"
    ((weights, seen),) = pool.run(1, train, "moving average", None, None, start, Late)
    ranks = pool.run(LAYOUTS[layout].world_size, train, "moving average", LAYOUTS[layout], None, start, Deferred)
    found, found_seen = merged(ranks)
    assert found_seen == pytest.approx(seen, rel=1e-5)
    assert_close(found, weights, 1e-6)


@pytest.mark.thorough
def test_a_copy_from_before_the_model_was_built_is_refused(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="StochasticWeightAveraging has a copy of Late from before it was changed"):
        pool.run(2, partial(train, model=Late), "from an epoch on", LAYOUTS["pipeline"])
