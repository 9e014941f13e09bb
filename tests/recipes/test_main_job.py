"""A small version of the main job, a wave trained by `hanayo fit`, writes all its files and prints where they are."""

import re
from pathlib import Path

import pytest

from tests.harness.launch import ROOT, launch

SMALL = {
    "data.path": "text.txt", "data.vocab_size": 300, "model.vocab_size": 300, "data.context": 16, "model.context": 16,
    "model.width": 32, "model.num_heads": 2, "trainer.max_steps": 8, "trainer.val_check_interval": 4,
    "trainer.limit_val_batches": 2, "trainer.log_every_n_steps": 2, "model.learning_rate": 1e-2,
    "trainer.devices": 2, "trainer.strategy.data_parallel_size": 1,
}  # fmt: skip


@pytest.mark.thorough
def test_it_writes_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 800)
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    config = str(ROOT / "recipes/gpt/wave.yaml")
    ended = launch(tmp_path, "-m", "lightning_hanayo", "fit", "--config", config, *options)
    assert (ended.code, ended.leftover) == (0, []), ended.output
    last = ended.output[ended.output.rindex("train loss") :]
    first_loss, last_loss = map(float, re.findall(r"(\d+\.\d+) (?:at the first|over the last)", last))
    assert last_loss < first_loss - 0.5, last
    assert re.search(r"val_loss +\d+\.\d+", last), last
    patterns = {"checkpoint": r"(\S+\.ckpt)", "wandb run": r"(\S+)", "pipeline": r"(\S+wave\.png)"}
    patterns |= {"trace": r"(\S+\.json)", "profile": r"(\S+\.json)"}
    for name, pattern in patterns.items():
        found = re.search(rf"^{name} +{pattern}", last, re.MULTILINE)
        assert found and (tmp_path / found[1]).exists(), last
    (records,) = (tmp_path / "runs/gpt/wandb").glob("offline-run-*/*.wandb")
    stored = records.read_bytes()
    names = (
        "hanayo/layout",
        "hanayo/predicted_bubble",
        "hanayo/weights_and_gradients_bytes",
        "hanayo/samples_per_step",
        "hanayo/seed",
        "hanayo/schedule",
        "hanayo/wave",
        "hanayo/bubble",
        "hanayo/exposed_communication",
        "hanayo/device_flops_per_s",
        "hanayo/tokens",
        "hanayo/rank_1/peak_memory_bytes",
        "pipeline_parallel_size",  # of the configuration
        "hanayo/stage_7/backward_weight_ms",
        "train_loss",
    )
    assert [name for name in names if name.encode() not in stored] == []
