"""What hooks do with a checkpoint that several ranks save: delete, rename, replace and add entries."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo.errors import CheckpointError
from tests.harness import models
from tests.harness.checkpoints import read
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer

CUBE = Layout(2, 1, cube=(1, 2, 1))
LAYOUTS = covered([Layout(2), CUBE], by=[Layout(2)])


def with_older_names(block: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A module's hook: one name is another, and one entry is left out."""
    state[f"{prefix}first.weight"] = state.pop(f"{prefix}up.weight")
    del state[f"{prefix}norm.bias"]


class Changed(models.MLP):
    """Changes what is saved, as on one process."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_state_dict_post_hook(with_older_names)
        self.register_buffer("count", torch.tensor(3))

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        state = super().state_dict(**options)
        state["renamed.blocks.2.down.bias"] = state.pop("blocks.2.down.bias")
        return state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["head.bias"]
        for name in [name for name in state if name.startswith("blocks.1.")]:
            state[f"renamed.{name}"] = state.pop(name).cpu().contiguous().clone()
        state["count"] = state["count"] + 1
        state["added"] = torch.arange(3)
        state["note"] = "no tensor"
        checkpoint["mine"] = {"scores": torch.ones(2), 3: (4, 5)}
        del checkpoint["optimizer_states"]


class Halved(models.MLP):
    """Stores half-precision values, which would be parts of unknown places in a cube."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value.half() for name, value in checkpoint["state_dict"].items()}


class Nested(models.MLP):
    """Keeps a second state dict, of which each rank has a part."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["averages"] = [dict(checkpoint["state_dict"]), torch.ones(2)]


class Incomplete(models.MLP):
    """Rank 1 leaves out what it alone has."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["averages"] = [checkpoint["state_dict"] if self.global_rank == 0 else {}]


class SavesInStep(models.MLP):
    def training_step(self, batch: models.Batch, batch_idx: int) -> Any:
        self.trainer.save_checkpoint("never.ckpt")
        return super().training_step(batch, batch_idx)


class FailsOnOneRank(models.MLP):
    failing = 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == self.failing:
            raise KeyError("the user's error")


class FailsOnRank0(FailsOnOneRank):
    failing = 0


def save(layout: Layout, model: Any, path: Path) -> None:
    trainer = make_trainer(layout, max_steps=1, strategy=make_strategy(layout) if layout.world_size > 1 else "auto")
    trainer.fit(models.build(model), make_loader(models.vectors((8,))))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_entries_that_a_hook_has_changed(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    for one, name in ((Layout(), "alone.ckpt"), (layout, "folder.ckpt")):
        pool.run(one.world_size, save, one, Changed, tmp_path / name)
    expected, found = (read(tmp_path / name) for name in ("alone.ckpt", "folder.ckpt"))
    assert "optimizer_states" not in found and found["mine"].keys() == {"scores", 3} and found["mine"][3] == (4, 5)
    assert found["state_dict"].pop("note") == expected["state_dict"].pop("note") == "no tensor"
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value)


@pytest.mark.thorough
def test_other_values_on_a_pipeline(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save, Layout(2), Halved, tmp_path / "folder.ckpt")
    assert {value.dtype for value in read(tmp_path / "folder.ckpt")["state_dict"].values()} == {torch.float16}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_second_dictionary_of_parameters(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    pool.run(layout.world_size, save, layout, Nested, tmp_path / "folder.ckpt")
    found = read(tmp_path / "folder.ckpt")
    averages, ones = found["averages"]
    assert ones.tolist() == [1, 1] and list(averages) == list(found["state_dict"])
    for name, value in found["state_dict"].items():
        assert torch.equal(averages[name] + 0, value + 0)


@pytest.mark.parametrize("model", [FailsOnOneRank, FailsOnRank0])
def test_after_a_run_an_error_of_one_rank_ends_all_with_that_error(pool: Pool, tmp_path: Path, model: Any) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(2, save, Layout(2), model, tmp_path / "folder.ckpt", timeout=30.0)
    found = {failure.rank: (failure.kind, failure.message) for failure in caught.value.failures}
    assert found[model.failing][0] == "KeyError"
    assert (
        found[1 - model.failing][0] == "PeerFailed" and 'KeyError: "the user\'s error"' in found[1 - model.failing][1]
    )


def save_twice(layout: Layout, wrong: Path, path: Path) -> None:
    trainer = make_trainer(layout, max_steps=1)
    trainer.fit(models.build(models.MLP), make_loader(models.vectors((8,))))
    with pytest.raises(CheckpointError, match="is a file"):
        trainer.save_checkpoint(wrong)
    trainer.save_checkpoint(path)


def test_after_an_error_that_all_ranks_have_they_may_save_again(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pool.run(2, save_twice, Layout(2), tmp_path / "file" / "folder.ckpt", tmp_path / "folder.ckpt")
    assert read(tmp_path / "folder.ckpt")["global_step"] == 1


REFUSED = [
    (CUBE, Halved, "half was called with .*, of which this rank holds a part"),
    (Layout(2), Incomplete, r"checkpoint\['averages'\]\[0\]\['blocks.2.norm.weight'\] has no values"),
    (Layout(2), SavesInStep, "trainer.save_checkpoint was called in a step, which runs on pipeline rank 0 alone"),
]


@pytest.mark.parametrize(("layout", "model", "named"), covered(REFUSED, by=[REFUSED[1]]))
def test_what_cannot_be_stored(pool: Pool, tmp_path: Path, layout: Layout, model: Any, named: str) -> None:
    with pytest.raises(RunFailed, match=named):
        pool.run(layout.world_size, save, layout, model, tmp_path / "folder.ckpt")
    assert not list(tmp_path.iterdir())
