"""A mistake that can be found before the launch gives one readable error, and no process starts."""

import subprocess
from typing import Any

import pytest
from lightning import LightningModule
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from tests.harness import models
from tests.harness.training import make_loader


class NoStack(models.Trained):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(models.WIDTH, models.CLASSES)

    def loss(self, batch: models.Batch) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch["x"]), batch["y"])


class Manual(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Repeated(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        block = models.Block()
        self.blocks = nn.ModuleList([*self.blocks[:6], block, block])


class Hooked(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].register_forward_hook(lambda module, inputs, output: output)


@pytest.fixture
def _no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **_: Any) -> None:
        pytest.fail(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


BAD = {  # options of the strategy, devices, model -> words of the message: the wrong numbers, and ones that fit
    "sizes that don't multiply": ({"pipeline_parallel_size": 2}, 3, models.MLP, ["2", "num_nodes is 3", "size=3"]),
    "a size left over": (
        {"pipeline_parallel_size": 4, "data_parallel_size": 2}, 4, models.MLP,
        ["pipeline_parallel_size=4 x data_parallel_size=2", "pipeline_parallel_size=4 with data_parallel_size=1"],
    ),
    "fewer blocks than stages": (
        {"pipeline_parallel_size": 4, "num_waves": 2}, 4, models.MLP, ["8", "16", "num_waves='auto'"],
    ),
    "no stack": ({}, 2, NoStack, ["NoStack", "name modules that its step calls in turn"]),
    "a wrong name of the stack": ({"blocks": "blcks"}, 2, models.MLP, ["'blcks'", "blocks"]),
    "unknown schedule": ({"schedule": "hanyo"}, 2, models.MLP, ["'hanyo'", "did you mean 'hanayo'"]),
    "waves without a wave": ({"schedule": "1f1b", "num_waves": 2}, 2, models.MLP, ["'1f1b' has no waves", "=2"]),
    "unknown weight": ({"loss_weight": "token"}, 2, models.MLP, ["'token'", "'tokens'"]),
    "time without an example": ({"balance": "time"}, 2, models.MLP, ["balance='time'", "MLP has none"]),
    "no waves": ({"num_waves": 0}, 2, models.MLP, ["num_waves", "0"]),
    "no micro-batches": ({"num_microbatches": 0}, 2, models.MLP, ["num_microbatches", "0"]),
}  # fmt: skip


class Sparse(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, models.WIDTH, sparse=True)


REFUSED = {
    "sparse gradients": ({"pipeline_parallel_size": 1, "cube": (2, 1, 1)}, Sparse, ["words has sparse gradients"]),
    "manual optimization": ({}, Manual, ["manual optimization"]),
    "a repeated block": ({}, Repeated, ["blocks[6]", "blocks[7]", "used twice"]),
    "a hook on a block": ({}, Hooked, ["blocks[3] has the hook", "is_local"]),
    "chimera": ({"schedule": "chimera"}, models.MLP, ["chimera"]),
}


def train(options: dict[str, Any], devices: int, model: type[LightningModule]) -> None:
    from lightning import Trainer

    from lightning_hanayo import HanayoStrategy

    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=HanayoStrategy(**options), logger=False, max_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model(), make_loader(models.vectors((8,))))


@pytest.mark.usefixtures("_no_process_starts")
@pytest.mark.parametrize("case", BAD)
def test_message_names_the_numbers_and_a_solution(case: str) -> None:
    options, devices, model, named = BAD[case]
    with pytest.raises(HanayoError) as caught:
        train(options, devices, model)
    assert [part for part in named if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.usefixtures("_no_process_starts")
@pytest.mark.parametrize("case", REFUSED)
def test_message_names_the_unsupported_feature(case: str) -> None:
    options, model, named = REFUSED[case]
    error = HanayoError if case == "chimera" else UnsupportedError
    with pytest.raises(error) as caught:
        train(options, 2, model)
    assert [part for part in named if part not in str(caught.value).lower()] == [], str(caught.value)
