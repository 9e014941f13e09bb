"""What a checkpoint holds besides tensors comes back as it was, and a document of another form is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hanayo.dist_checkpointing.state import OptimizerDocument, StateDocument, encode
from lightning_hanayo.errors import CheckpointError

DOCUMENT = StateDocument(
    checkpoint={"epoch": 1, "callbacks": {"EMA": {"decay": 0.9, "mean": torch.arange(3)}}},
    names=["embedding", "head", "extra"],
    tied={"head": "embedding"},
    values={"extra": {3: (4,)}},
    versions={"": {"version": 1}},
    optimizers=[
        OptimizerDocument(
            "torch.optim.sgd.SGD",
            [{"lr": 0.1, "params": ["embedding"]}, {"lr": 0.2, "params": []}],
            values={"embedding": {"count": 3}},
        )
    ],
)


def no_tensor(number: int) -> Tensor:
    raise AssertionError(f"tensor {number} isn't needed")


def test_a_document_comes_back() -> None:
    encoded, tensors = DOCUMENT.encode()
    found = StateDocument.decode(encoded, tensors.__getitem__, "state.json")
    mean = found.checkpoint["callbacks"]["EMA"].pop("mean")
    assert torch.equal(mean, DOCUMENT.checkpoint["callbacks"]["EMA"].pop("mean"))
    assert found == DOCUMENT


def test_weights_without_optimizers_are_told_from_an_empty_list_of_them() -> None:
    for optimizers in (None, []):
        encoded, _ = StateDocument({}, [], optimizers=optimizers).encode()
        assert StateDocument.decode(encoded, no_tensor, "state.json").optimizers == optimizers


CHANGES: list[tuple[str, Any]] = [
    ("checkpoint", []),
    ("checkpoint", {1: 2}),
    ("names", "embedding"),
    ("names", [1]),
    ("tied", {"head": "tail"}),
    ("tied", {"head": "head"}),
    ("tied", {"head": ["embedding"]}),
    ("values", None),
    ("optimizers", 3),
    ("optimizers", [{}]),
    ("optimizers", [{"class_name": "SGD", "param_groups": [{"params": [0]}]}]),
    ("optimizers", [{"class_name": "SGD", "param_groups": [3]}]),
    ("optimizers", [{"class_name": "SGD", "param_groups": [], "values": {"a": 1}}]),
    ("another", 1),
]


@pytest.mark.parametrize(("key", "value"), CHANGES, ids=str)
def test_a_document_of_another_form_is_refused(key: str, value: Any) -> None:
    content = {"checkpoint": {}, "names": ["embedding", "head"], "tied": {}, "values": {}, "versions": {}}
    document, _ = encode({**content, "optimizers": None, key: value}, "state")
    with pytest.raises(CheckpointError, match="another form|the form of a state document"):
        StateDocument.decode(document, no_tensor, "last.ckpt/state.json")
    with pytest.raises(CheckpointError):
        StateDocument.decode(["not a dict"], no_tensor, "state.json")
