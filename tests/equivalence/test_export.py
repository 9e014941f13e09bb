"""What is exported of a layout's checkpoint folder is the file that rank 0 would have gathered, and a plain Trainer's.

a layout        one epoch    saved as a folder, exported as a file    another epoch, by a plain Trainer
                             saved as a file, by rank 0
one process     two epochs
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.dist_checkpointing.export import export_checkpoint
from lightning_hanayo.dist_checkpointing.state import RUN
from tests.equivalence.test_checkpoints import ALONE, assert_same, train
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close

GPT2 = Training(models.gpt2, partial(models.texts, (8, 8, 8)), torch.float64, loss_weight="tokens")
TOLERANCE = 1e-6
"""the model's own loss is in fp32"""
LAYOUTS = [Layout(2, 1, 1), Layout(2, 2, 1), Layout(2, 1, 1, cube=(1, 2, 1)), Layout(2, 1, 2)]


def loaded(folder: Path) -> nn.Module:
    """The model that transformers makes of an exported folder."""
    from transformers import GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel.from_pretrained(folder)
    return model


def in_order(value: Any) -> Any:
    """With the keys of dictionaries sorted: a folder doesn't keep the order of the states of one parameter."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value, key=str)}
    return [in_order(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=[]), ids=str)
def test_an_exported_checkpoint_is_that_of_one_process(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    (expected,) = pool.run(1, train, GPT2, ALONE, 2, tmp_path / "alone.ckpt")
    pool.run(layout.world_size, train, GPT2, layout, 1, tmp_path / "folder.ckpt")
    pool.run(layout.world_size, partial(train, save_full=True), GPT2, layout, 1, tmp_path / "gathered.ckpt")
    for to, name in (("file", "whole.ckpt"), ("huggingface", "gpt2"), ("safetensors", "weights")):
        written = export_checkpoint(str(tmp_path / "folder.ckpt"), str(tmp_path / name), to=to)
        assert not written.notes and not written.left_out

    gathered, whole = (torch.load(tmp_path / name, weights_only=True) for name in ("gathered.ckpt", "whole.ckpt"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "epoch", "global_step", RUN):
        assert_same(in_order(whole[part]), in_order(gathered[part]), part)
    (outcome,) = pool.run(1, train, GPT2, ALONE, 2, tmp_path / "resumed.ckpt", tmp_path / "whole.ckpt")
    assert_close(outcome.weights, expected.weights, TOLERANCE)
    state = {f"model.{name}": value for name, value in loaded(tmp_path / "gpt2").state_dict().items()}
    assert_same(state, dict(whole["state_dict"]))
