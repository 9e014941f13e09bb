"""`check` takes what a user has, leaves it as it is, and refuses bad arguments before any process starts."""

from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer

import lightning_hanayo
from lightning_hanayo import HanayoStrategy, check
from lightning_hanayo.checking import trainings
from lightning_hanayo.errors import HanayoError
from tests.harness import models
from tests.harness.limits import real_seconds
from tests.harness.training import make_loader

WAVE: dict[str, Any] = {"pipeline_parallel_size": 2, "num_waves": 1}
VECTORS = models.vectors((8, 8))


class Sparse(models.MLP):
    """A block has a hook, which the strategy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].register_forward_hook(_hook)


def _hook(*_: Any) -> None: ...


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "run", lambda *_, **__: pytest.fail("a process was started"))


def test_check_is_a_public_name() -> None:
    assert "check" in lightning_hanayo.__all__ and callable(check)


def test_a_module_stays_as_it_is_even_after_a_training() -> None:
    module = models.build(models.MLP)
    Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, make_loader(VECTORS))  # fmt: skip
    before = {name: value.clone() for name, value in module.state_dict().items()}
    told: list[str] = []
    strategy = HanayoStrategy(**WAVE, master_weights="fp32", step="microbatch")  # of no use where all is in fp64
    verdict = check(module, VECTORS, strategy, depth=4, tell=told.append)
    assert verdict.outcome == "exact" and len(told) == 3
    assert module.dtype == torch.float32 and len(module.blocks) == 8  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_fork_does_not_wait_for_threads_that_its_parent_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # Lightning would use as many as there are cores
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _ = torch.ones(512, 512) @ torch.ones(512, 512)
        verdict = check(models.build(models.MLP), VECTORS, HanayoStrategy(**WAVE), timeout=real_seconds(30.0))
    finally:
        torch.set_num_threads(before)
    assert verdict.outcome == "exact", verdict.summary


@pytest.mark.usefixtures("no_process")
def test_what_the_strategy_refuses_is_known_before_a_process_starts() -> None:
    verdict = check(Sparse(), VECTORS, HanayoStrategy(**WAVE))
    assert verdict.outcome == "refused" and "blocks[3] has the hook" in verdict.summary


class Locked(models.MLP):
    def __deepcopy__(self, memo: Any) -> LightningModule:
        raise TypeError("cannot pickle a lock")


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (models.MLP, {"steps": 0}, "steps=0"),
        (models.MLP, {"dtype": torch.float16}, "dtype=torch.float16: expected torch.float64 or torch.float32"),
        (models.MLP, {"strategy": "hanayo"}, "strategy='hanayo': expected a HanayoStrategy"),
        (models.MLP, {"devices": 3}, "processes, but devices x num_nodes is 3"),
        (models.MLP, {"depth": 2}, "every stage needs a block"),
        (Locked, {}, "Locked can't be copied, which a check needs: cannot pickle a lock"),
    ],
)
def test_bad_arguments_are_a_mistake(module: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(HanayoError, match=message):
        check(module(), VECTORS, **{"strategy": HanayoStrategy(**WAVE)} | options)


class Contrastive(models.MLP):
    """Compares the samples of a batch, and has dropout outside the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)

    def loss(self, batch: models.Batch) -> torch.Tensor:
        scores = self.dropout(self(batch["x"]))
        return torch.nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


@pytest.mark.thorough
def test_a_step_on_whole_batches_is_compared_with_that_of_one_process() -> None:
    options = WAVE | {"num_microbatches": 4}
    assert check(models.build(Contrastive), VECTORS, HanayoStrategy(**options), depth=4).outcome == "exact"
    verdict = check(models.build(Contrastive), VECTORS, HanayoStrategy(**options, step="batch"), depth=4)
    assert verdict.outcome == "exact"
    assert verdict.notes == ("dropout was off: the masks of blocks are those of micro-batches",)
