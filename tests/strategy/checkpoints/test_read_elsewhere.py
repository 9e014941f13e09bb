"""Checkpoints of several ranks outside their runs: in one process, by `load_from_checkpoint`, `torch.load`, a Trainer.

last.ckpt      a folder     load_from_checkpoint, a plain Trainer      torch.load names the export
weights.ckpt   a file       load_from_checkpoint, torch.load           fit(ckpt_path=...) needs more, as in Lightning
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hanayo.dist_checkpointing.export import read_folder
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.errors import CheckpointError
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, make_loader, make_trainer

CUBE = Layout(2, 1, 1, cube=(1, 2, 1))


class Sized(models.MLP):
    """Has a hyperparameter, and Adam, whose states have numbers."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def sized() -> Sized:
    return Sized(scale=2.0)


def train(layout: Layout, folder: Path) -> dict[str, Tensor] | None:
    """Save a checkpoint and the weights after two steps; return the whole state on rank 0."""
    trainer, module = make_trainer(layout, max_steps=2), models.build(sized)
    trainer.fit(module, make_loader(models.vectors((8, 8))))
    trainer.save_checkpoint(folder / "last.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    strategy: Any = trainer.strategy
    whole = strategy.gather_model()
    return None if whole is None else dict(whole.state_dict())


def resume(layout: Layout, path: Path) -> dict[str, Tensor] | None:
    """Train one more step from a checkpoint."""
    trainer, module = make_trainer(layout, max_steps=3), models.build(Sized)
    trainer.fit(module, make_loader(models.vectors((8, 8))), ckpt_path=path)
    assert trainer.global_step == 3
    strategy: Any = trainer.strategy
    whole = module if layout.world_size == 1 else strategy.gather_model()
    return None if whole is None else dict(whole.state_dict())


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("saved")
    whole, *_ = pool.run(CUBE.world_size, train, CUBE, folder)
    return folder, whole


def test_load_from_checkpoint_reads_the_folders_model_alone(
    saved: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = saved
    read, names = CheckpointFolder.read, []

    def noted(self: CheckpointFolder, name: str, *args: Any) -> Tensor:
        names.append(name)
        return read(self, name, *args)

    monkeypatch.setattr(CheckpointFolder, "read", noted)
    loaded = Sized.load_from_checkpoint(folder / "last.ckpt")
    assert equal(loaded.state_dict(), whole) and loaded.hparams["scale"] == 2.0
    values = [name for name in names if not name.endswith("/step")]  # numbers, which optimizers keep as they get them
    assert values == [f"model/{name}" for name in whole]
    assert Sized.load_from_checkpoint(str(folder / "last.ckpt"), scale=3.0).hparams["scale"] == 3.0


def test_a_device_is_where_values_go(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path = saved[0] / "last.ckpt"
    for location in ("meta", {"cpu": "meta"}, torch.device("meta"), lambda *_: torch.UntypedStorage(0, device="meta")):
        content = read_folder(path, location)
        assert content is not None and {one.device.type for one in content["state_dict"].values()} == {"meta"}


def test_a_damaged_folder_is_refused(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    for file in (saved[0] / "last.ckpt").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    next(tmp_path.glob("model-*")).unlink()
    with pytest.raises(CheckpointError, match="is missing. Copy the whole folder"):
        Sized.load_from_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError):
        Sized.load_from_checkpoint(tmp_path / "none.ckpt")


def test_torch_load_names_the_export(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"hanayo ckpt export .*last.ckpt whole.ckpt --to file.*save_full=True"):
        torch.load(saved[0] / "last.ckpt")
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        torch.load(tmp_path)
    assert pickle.loads(pickle.dumps(torch.load)) is torch.load


def test_weights_alone_are_a_file(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, whole = saved
    content = torch.load(folder / "weights.ckpt", weights_only=True)
    assert equal(content["state_dict"], whole) and content["hyper_parameters"] == {"scale": 2.0}
    assert not content.keys() & {"optimizer_states", "callbacks", "lightning_hanayo"}
    assert equal(Sized.load_from_checkpoint(folder / "weights.ckpt").state_dict(), whole)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [Layout(), Layout(2)], ids=str)
def test_weights_alone_are_not_resumed(pool: Pool, saved: tuple[Path, dict[str, Tensor]], layout: Layout) -> None:
    with pytest.raises(RunFailed, match="KeyError.*checkpoint contains only the model"):
        pool.run(layout.world_size, resume, layout, saved[0] / "weights.ckpt")


@pytest.mark.thorough
def test_a_plain_trainer_resumes_from_the_folder(pool: Pool, saved: tuple[Path, dict[str, Tensor]]) -> None:
    (alone,) = pool.run(1, resume, Layout(), saved[0] / "last.ckpt")
    gathered, *_ = pool.run(CUBE.world_size, resume, CUBE, saved[0] / "last.ckpt")
    for name, value in gathered.items():
        torch.testing.assert_close(alone[name], value, rtol=1e-5, atol=1e-6)
