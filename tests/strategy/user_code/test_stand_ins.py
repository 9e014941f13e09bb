"""Values of pipeline rank 0 on another rank: sent, or a shape without values."""

from typing import Any

import pytest
import torch

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.missing_values import MissingValues
from lightning_hanayo.strategy.user_code.stand_ins import Packer, from_text, to_text


def sent(name: str, value: Any, budget: int) -> Any:
    return from_text(to_text(Packer(budget).pack(name, value)), torch.device("cpu"))


def test_what_fits_is_sent_and_the_rest_has_a_shape() -> None:
    outputs = sent("outputs", {"loss": torch.tensor(1.5), "logits": torch.zeros(8, 5), "names": ["a", "b"]}, budget=8)
    assert outputs["loss"].item() == 1.5 and outputs["names"] == ["a", "b"]
    logits = outputs["logits"]
    assert isinstance(logits, MissingValues) and logits.shape == (8, 5)
    assert logits.softmax(-1).mean().shape == ()
    with pytest.raises(UnsupportedError, match=r"outputs\['logits'\] is on pipeline rank 0.*is_global_zero"):
        float(logits.mean())


def test_objects_that_cant_be_sent_can_be_passed_on() -> None:
    pair = sent("batch", (object(), 3), budget=8)
    assert pair[1] == 3
    with pytest.raises(UnsupportedError, match=r"reads batch\[0\] .*this object is on pipeline rank 0 alone"):
        print(pair[0].size)
