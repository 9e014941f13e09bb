"""What doesn't fit a run is refused before a value changes, with one message on all ranks, and a way out that works.

torch.save(a checkpoint with one mistake)   ->   trainer.fit(..., ckpt_path=it) on two ranks
"""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo.errors import HanayoError, PeerFailed
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer
from tests.strategy.checkpoints.as_folder import as_folder

Checkpoint = dict[str, Any]
WAVE = Layout(2, 1, 1)


def plain_checkpoint(path: Path) -> None:
    """What a plain Trainer saves after two steps."""
    trainer = make_trainer(Layout(), max_steps=2)
    trainer.fit(models.build(models.MLP), make_loader(models.vectors((8, 8))))
    trainer.save_checkpoint(path)


def other_model(checkpoint: Checkpoint) -> None:
    checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}


def missing(checkpoint: Checkpoint) -> None:
    del checkpoint["state_dict"]["blocks.3.up.bias"]


def extra(checkpoint: Checkpoint) -> None:
    checkpoint["state_dict"]["temperature"] = torch.ones(())


def shape(checkpoint: Checkpoint) -> None:
    checkpoint["state_dict"]["head.weight"] = torch.zeros(7, 16)


def dtype(checkpoint: Checkpoint) -> None:
    state = checkpoint["state_dict"]
    state["blocks.2.down.weight"] = state["blocks.2.down.weight"].half()


def nan(checkpoint: Checkpoint) -> None:
    checkpoint["state_dict"]["blocks.3.up.weight"][5, 3] = torch.nan  # of the second rank


def state_lost(checkpoint: Checkpoint) -> None:
    del checkpoint["optimizer_states"][0]["state"][5]


def no_optimizer(checkpoint: Checkpoint) -> None:
    checkpoint["optimizer_states"] = []


def no_checkpoint(checkpoint: Checkpoint) -> None:
    del checkpoint["state_dict"]


REFUSED: dict[Callable[[Checkpoint], None], str] = {
    other_model: "not of this MLP: they have 0 names in common.",
    missing: "blocks.3.up.bias",
    extra: "not in the model",
    shape: "Build the model with the sizes that it was saved with",
    dtype: "load_anyway=('dtype',)",
    nan: "has NaN or infinite values in blocks.3.up.weight",
    state_lost: "has no optimizer state of blocks.2.up.weight",
    no_optimizer: "has the states of 0 optimizers, this MLP has 1",
    no_checkpoint: "is no Lightning checkpoint: it has no 'state_dict'",
}


ONLY_PLAIN = (no_checkpoint,)


def messages(folder: Path, layout: Layout) -> dict[str, str]:
    """What this rank raises for each bad checkpoint. A script may catch it, and go on."""
    found = {}
    for change in REFUSED:
        try:
            resume(folder / change.__name__ / "bad.ckpt", layout)
        except HanayoError as error:
            found[change.__name__] = str(error)
        except PeerFailed as error:  # the rank that was first shows it
            found[change.__name__] = error.cause.partition("CheckpointError: ")[2]
    return found


def resume(path: Path, layout: Layout, *, strict: bool = True, accept: tuple[str, ...] = ()) -> None:
    strategy = make_strategy(layout, load_anyway=accept, nonfinite="ignore" if "nan" in accept else "raise")
    trainer = make_trainer(layout, max_steps=3, strategy=strategy)
    module = models.build(models.MLP)
    module.strict_loading = strict
    trainer.fit(module, make_loader(models.vectors((8,) * 3)), ckpt_path=path)


def spoil(source: Path, folder: Path, kind: str, changes: Any) -> None:
    """Write a copy of a checkpoint for each mistake."""
    for change in changes:
        checkpoint = torch.load(source, weights_only=True)
        change(checkpoint)
        (folder / change.__name__).mkdir()
        path = folder / change.__name__ / "bad.ckpt"
        if kind == "plain" or change in ONLY_PLAIN:
            torch.save(checkpoint, path)
        else:
            as_folder(checkpoint, path, models.optimizer_names(models.MLP()))


LAYOUTS = [WAVE, Layout(), Layout(1, 1, 2), Layout(1, cube=(1, 2, 1))]
CASES = [(layout, kind) for layout in LAYOUTS for kind in ("plain", "folder")]


@pytest.mark.parametrize(("layout", "kind"), covered(CASES, by=[(WAVE, "folder")]), ids=str)
def test_each_mistake_has_one_message_on_all_ranks(pool: Pool, tmp_path: Path, layout: Layout, kind: str) -> None:
    pool.run(1, plain_checkpoint, tmp_path / "good.ckpt")
    spoil(tmp_path / "good.ckpt", tmp_path, kind, REFUSED)
    first, *others = pool.run(layout.world_size, messages, tmp_path, layout)
    for change, expected in REFUSED.items():
        assert expected in first[change.__name__], change.__name__
    assert all(other == first for other in others)


ACCEPTED: dict[Callable[[Checkpoint], None], tuple[dict[str, Any], str]] = {
    missing: ({"strict": False}, "not in the checkpoint, keeps the model's values: blocks.3.up.bias"),
    extra: ({"strict": False}, "not in the model, left out: temperature"),
    dtype: ({"accept": ("dtype",)}, "converted to the model's dtype: blocks.2.down.weight"),
    nan: ({"accept": ("nan",)}, "has NaN or infinite values in blocks.3.up.weight: accepted"),
    state_lost: ({"accept": ("optimizer_state",)}, "no optimizer state of blocks.2.up.weight: accepted"),
}


def warned(folder: Path, layout: Layout) -> dict[str, list[str]]:
    """What this rank warns of when each bad checkpoint is accepted."""
    found = {}
    for change, (options, _) in ACCEPTED.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resume(folder / change.__name__ / "bad.ckpt", layout, **options)
        found[change.__name__] = [str(one.message) for one in caught]
    return found


def test_each_way_out_works_and_is_said_once(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, plain_checkpoint, tmp_path / "good.ckpt")
    spoil(tmp_path / "good.ckpt", tmp_path, "folder", ACCEPTED)
    first, second = pool.run(2, warned, tmp_path, WAVE)
    for change, (_, expected) in ACCEPTED.items():
        assert sum(expected in line for line in first[change.__name__]) == 1, first[change.__name__]
        assert not any(expected in line for line in second[change.__name__])


def flip(folder: Path) -> str:
    """One bit of a tensor that the second rank holds, in the middle of its file."""
    file = folder / "model-00001-5f2c9a1b.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)
    return "model-00001-5f2c9a1b.safetensors is damaged: the values of model/"


def truncate(folder: Path) -> str:
    os.truncate(folder / "optimizer-00000-5f2c9a1b.safetensors", 1000)
    return "optimizer-00000-5f2c9a1b.safetensors is damaged: it is truncated, 1000 instead of"


def lose_a_file(folder: Path) -> str:
    (folder / "model-00000-5f2c9a1b.safetensors").unlink()
    return "model-00000-5f2c9a1b.safetensors is missing"


def lose_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "has no manifest.json"


def be_of_torch(folder: Path) -> str:
    (folder / "manifest.json").rename(folder / ".metadata")
    return "is a folder of torch.distributed.checkpoint, as FSDPStrategy saves shards. Make one file of it, python -m"


def lose_all(folder: Path) -> str:
    shutil.rmtree(folder)
    return "Checkpoint file not found"


DAMAGES = [flip, truncate, lose_a_file, lose_the_manifest, be_of_torch, lose_all]


def refusals(folder: Path) -> list[str]:
    """What this rank raises for each damaged folder."""
    found = []
    for damage in DAMAGES:
        try:
            resume(folder / damage.__name__, WAVE)
        except (HanayoError, FileNotFoundError) as error:
            found.append(str(error))
        except PeerFailed as error:
            found.append(error.cause.partition("Error: ")[2])
    return found


def test_each_damage_has_one_message_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, plain_checkpoint, tmp_path / "good.ckpt")
    expected = []
    for damage in DAMAGES:
        good = torch.load(tmp_path / "good.ckpt", weights_only=True)
        as_folder(good, tmp_path / damage.__name__, models.optimizer_names(models.MLP()))
        expected.append(damage(tmp_path / damage.__name__))
    first, second = pool.run(2, refusals, tmp_path)
    assert first == second
    assert all(part in text for part, text in zip(expected, first, strict=True)), first
