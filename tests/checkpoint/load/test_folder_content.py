"""A folder becomes the dictionary that Lightning knows; tensors of model and optimizers aren't read yet."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo.dist_checkpointing.compare import folder_content
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.state import OptimizerDocument, StateDocument
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.folders import write_folder

TENSORS = {
    "model/b.weight": torch.randn(4, 3),
    "model/a": torch.randn(2),
    "optimizer/0/b.weight/step": torch.tensor(7.0),
    "optimizer/0/b.weight/exp_avg": torch.randn(4, 3),
    "optimizer/0/a/exp_avg": torch.randn(2),
}
DOCUMENT = StateDocument(
    {"epoch": 3, "callbacks": {"EMA": torch.ones(2)}},
    ["a", "b.weight", "c.weight", "b._extra_state"],
    {"c.weight": "b.weight"},
    {"b._extra_state": {"seen": 5}},
    {"b": {"version": 2}},
    [
        OptimizerDocument(
            "torch.optim.adamw.AdamW",
            [{"lr": 0.1, "params": ["a", "frozen"]}, {"lr": 0.2, "params": ["b.weight"]}],
            {"a": {"step": 3}},
            ["frozen"],
            {"extra": 1},
        )
    ],
)


def write(path: Path, document: StateDocument = DOCUMENT, **missing: Any) -> CheckpointFolder:
    encoded, tensors = document.encode()
    named = {f"state/{n}": tensor for n, tensor in enumerate(tensors)}
    kept = {name: tensor for name, tensor in TENSORS.items() if name not in missing.get("without", ())}
    write_folder(path, kept | named, texts={"state": json.dumps(encoded).encode()})
    return CheckpointFolder(path)


def test_a_folder_has_what_a_plain_file_has(tmp_path: Path) -> None:
    content = folder_content(write(tmp_path))
    state = content["state_dict"]
    assert list(content) == ["epoch", "callbacks", "state_dict", "optimizer_states"] and content["epoch"] == 3
    assert torch.equal(content["callbacks"]["EMA"], torch.ones(2))
    assert list(state) == DOCUMENT.names and state._metadata == {"b": {"version": 2}}
    assert state["b._extra_state"] == {"seen": 5}
    for name, stored in (("a", "a"), ("b.weight", "b.weight"), ("c.weight", "b.weight")):
        assert type(state[name]) is StoredTensor and torch.equal(state[name].read(), TENSORS[f"model/{stored}"])


def test_optimizer_states_have_names(tmp_path: Path) -> None:
    (state,) = folder_content(write(tmp_path))["optimizer_states"]
    assert list(state["state"]) == ["a", "b.weight"] and state["state"]["a"]["step"] == 3
    assert torch.equal(state["state"]["b.weight"]["exp_avg"].read(), TENSORS["optimizer/0/b.weight/exp_avg"])
    assert state["param_groups"] == DOCUMENT.optimizers[0].param_groups  # type: ignore[index]
    assert (state["without_state"], state["extra"]) == (["frozen"], 1)


def test_without_optimizers_there_are_no_states(tmp_path: Path) -> None:
    assert "optimizer_states" not in folder_content(write(tmp_path, StateDocument({"epoch": 1}, ["a"])))


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has no values of a"):
        folder_content(write(tmp_path / "model", without=["model/a"]))
    write_folder(tmp_path / "none", TENSORS)
    with pytest.raises(CheckpointError, match="there is no 'state'"):
        folder_content(CheckpointFolder(tmp_path / "none"))
