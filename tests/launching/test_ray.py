"""The recipe for Ray Train ends with the weights of one process. Needs the extra `ray`: tox -e ray."""

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from recipes.gpt.data import TextData
from recipes.gpt.module import GPT
from tests.harness.launch import ROOT
from tests.harness.training import assert_close

ray = pytest.importorskip("ray", reason="needs the extra `ray`: tox -e ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]  # of Ray's own
STEPS = 4


def test_weights_equal_those_of_one_process(tmp_path: Path) -> None:
    from recipes.ray.__main__ import run

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 800)
    trainer = {"max_steps": STEPS, "limit_val_batches": 0, "default_root_dir": str(tmp_path)}
    trainer["use_distributed_sampler"] = False  # which shuffles in another order
    config: dict[str, Any] = {
        "workers": 4,
        "strategy": {"pipeline_parallel_size": 4, "num_waves": 1, "num_microbatches": 4},
        "model": {"vocab_size": 300, "context": 16, "width": 32, "num_heads": 2},
        "data": {"path": str(tmp_path / "text.txt"), "vocab_size": 300, "context": 16, "batch_size": 8}
        | {"cache_dir": str(tmp_path / "cache")},
        "trainer": trainer,
    }
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        result = run(config, tmp_path / "ray")
        with result.checkpoint.as_directory() as folder:
            found = torch.load(Path(folder, "weights.pt"), weights_only=True)
    finally:
        ray.shutdown()

    L.seed_everything(1)
    alone = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, **trainer
    )
    module = GPT(**config["model"])
    L.seed_everything(1)  # as several processes do when they have met
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone.fit(module, TextData(**config["data"]))
    assert_close(found, {name: value.detach() for name, value in module.state_dict().items()}, 1e-5)
