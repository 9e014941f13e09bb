"""`HanayoStrategy(layout=...)`: a plan's file, and a plan that is made when training starts."""

import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.machine import machine
from lightning_hanayo.planner.ranking import make_plan, overlay, save_plan, strategy_options
from tests.harness.pool import Pool
from tests.planner.llamas import llama
from tests.strategy.planning.test_read_model import SAMPLES, Module


def write_plan(path: Path) -> dict[str, Any]:
    """Of a small model on eight devices."""
    plan = make_plan(llama(8, 256, 768, 8, 8), machine("h100"), num_devices=8, step=32, top=1)
    save_plan(path, plan, overlay(plan, num_nodes=1, accelerator="gpu", sets_batch_size=False))
    return strategy_options(plan.first.candidate)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    planned = write_plan(path)
    options = HanayoStrategy(layout=path, nonfinite="skip").options
    for name, value in planned.items():
        assert getattr(options, name) == (tuple(value) if isinstance(value, list) else value)
    assert options.nonfinite == "skip"


@pytest.mark.parametrize("given", [{"pipeline_parallel_size": 2}, {"num_waves": 1}, {"shard_optimizer": True}], ids=str)
def test_a_size_that_is_given_twice(given: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(path)
    name = next(iter(given))
    with pytest.raises(HanayoError, match=rf"plan\.yaml' says what {name} is, and so does {name}="):
        HanayoStrategy(layout=path, **given)


@pytest.mark.parametrize("layout", ["", 3, "none.yaml"])
def test_no_layout(layout: Any) -> None:
    with pytest.raises(HanayoError, match="layout="):
        HanayoStrategy(layout=layout)


def test_a_plan_leaves_the_optimizer_to_the_user() -> None:
    assert HanayoStrategy(layout="plan", shard_optimizer=True, schedule="hanayo").options.layout == "plan"


def fit(data: Any, layout: str | None = "plan") -> list[Tensor]:
    """Train a step in one process, and return the batches that it gets."""
    seen: list[Tensor] = []

    class Watched(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch = batch if isinstance(batch, Tensor) else batch["one"]
            if not batch.is_meta:
                seen.append(batch.detach().clone())
            return super().training_step(batch, batch_idx)

    strategy = HanayoStrategy(layout=layout)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, **quiet).fit(Watched(), data)  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("size", [1, 13, 100], ids=str)
def test_batches_of_any_size(size: int) -> None:
    assert sum(map(len, fit(DataLoader(torch.zeros(200, 8), batch_size=size)))) == size


def test_a_plan_takes_no_batch_from_training() -> None:
    """Nor does it draw from the generator that shuffles."""

    def loader() -> DataLoader[Any]:
        rows: Any = torch.arange(512.0).view(64, 8)
        return DataLoader(rows, batch_size=SAMPLES, shuffle=True, generator=torch.Generator().manual_seed(3))

    with_plan, without = (torch.cat(fit(loader(), layout)) for layout in ("plan", None))
    assert torch.equal(with_plan, without)


@pytest.mark.parametrize("combine", [lambda loaders: loaders, lambda loaders: CombinedLoader(loaders, "min_size")])
def test_several_loaders(combine: Any) -> None:
    rows: Any = torch.zeros(64, 8)
    fit(combine({"one": DataLoader(rows, batch_size=SAMPLES), "other": DataLoader(rows, batch_size=SAMPLES)}))


class Locked(L.LightningDataModule):
    """Can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (Locked(), "which can't be copied"),
        (DataLoader([], batch_size=4), "the training loader has no batch"),
        (iter([torch.zeros(4, 8)]), "a loader that can be read twice"),
        (DataLoader(["a"] * 8, batch_size=4), "can't"),  # type: ignore[arg-type]
    ],
    ids=["locked", "empty", "iterator", "strings"],
)
def test_data_of_which_no_plan_can_be_made(data: Any, named: str) -> None:
    with pytest.raises(HanayoError, match=named):
        fit(data)


def train(layout: str | None) -> tuple[tuple[int, ...], list[float]]:
    """Train two steps; returns the topology's sizes and the parameters."""
    torch.manual_seed(0)
    module = Module(blocks=8)
    strategy = HanayoStrategy(layout=layout)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(torch.arange(64.0).view(8, 8) / 64, batch_size=SAMPLES))
    return strategy.topology.sizes, [float(value.sum()) for value in strategy.lightning_module_state_dict().values()]


def test_a_plan_at_the_start(pool: Pool) -> None:
    (sizes, _), (same, _) = pool.run(2, train, "plan")
    assert sizes == same
    assert torch.tensor(sizes).prod() == 2


def test_an_evaluation_has_no_plan() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=HanayoStrategy(layout="plan"), logger=False)
    with pytest.raises(HanayoError, match="layout='plan' chooses when training starts"):
        trainer.test(Module(), DataLoader(torch.zeros(4, 8)))
