"""Models whose state is more than plain parameters: extra states of blocks, frozen parts, quantized weights."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.harness import models
from tests.harness.checkpoints import read
from tests.harness.pool import Pool, RunFailed
from tests.harness.quantized import Quantized
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer


class Counting(models.Block):
    """Counts its calls, in a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"forward": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls["forward"] += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = dict(state)


class Odd(models.MLP):
    """Most of it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in self.blocks)
        self.blocks.requires_grad_(False)
        self.blocks[1].up.requires_grad_(True)

    def validation_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)


class QuantizedBlocks(models.MLP):
    """The blocks' weights are frozen, and quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        for block in self.blocks:
            block.up.weight = nn.Parameter(Quantized.of(block.up.weight), requires_grad=False)


def save(model: Any, path: Path, how: str, checkpointing: bool, save_full: bool = False) -> None:
    module = models.build(model)
    options: dict[str, Any] = {
        "enable_checkpointing": checkpointing,
        "default_root_dir": path.parent,
        "num_sanity_val_steps": 0,
    }
    trainer = make_trainer(Layout(2), max_steps=1, strategy=make_strategy(Layout(2), save_full=save_full), **options)
    loader = make_loader(models.vectors((8,)))
    getattr(trainer, how)(module, *[loader] * (2 if how == "fit" and model is Odd else 1))
    trainer.save_checkpoint(path)


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "save_full"), [("fit", False), ("fit", True), ("validate", False)])
def test_extra_states_of_all_ranks_and_states_of_what_is_trained(
    pool: Pool, tmp_path: Path, how: str, save_full: bool
) -> None:
    pool.run(2, save, Odd, tmp_path / "odd.ckpt", how, False, save_full)
    saved, expected = read(tmp_path / "odd.ckpt"), Odd()
    assert list(saved["state_dict"]) == list(expected.state_dict())
    calls = [value for name, value in saved["state_dict"].items() if name.endswith("_extra_state")]
    assert calls == [calls[0]] * len(expected.blocks) and calls[0]["forward"] > 0
    trained: set[Any] = {name for name, parameter in expected.named_parameters() if parameter.requires_grad}
    if save_full:  # numbers of parameters
        trained = set(range(len(trained)))
    if how == "fit":
        assert set(saved["optimizer_states"][0]["state"]) == trained


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", [True, False])
def test_quantized_weights_are_refused(pool: Pool, tmp_path: Path, checkpointing: bool) -> None:
    with pytest.raises(RunFailed, match=r"up\.weight \(a Quantized in .*\) can't be stored.*save_full=True"):
        pool.run(2, save, QuantizedBlocks, tmp_path / "folder.ckpt", "fit", checkpointing)
