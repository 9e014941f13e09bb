"""Values of pipeline rank 0 on another rank: sent, or a shape without values."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.guards import MissingValues, Owner, without_values
from lightning_hanayo.pipeline_parallel.batches.microbatches import children
from lightning_hanayo.pipeline_parallel.object_collectives import to_text
from lightning_hanayo.strategy.user_code.collected import hide_changed, sent_or_own
from lightning_hanayo.strategy.user_code.hand_over import Packer, from_packed


def sent(name: str, value: Any, budget: int) -> Any:
    return from_packed(to_text(Packer(budget).pack(name, value)), torch.device("cpu"))


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


def test_each_rank_keeps_what_the_first_has_no_values_of() -> None:
    device = torch.device("cpu")
    elsewhere = without_values(torch.zeros(2), Owner("blocks.2.weight", 1, device))
    own, parameter = torch.ones(2), nn.Parameter(torch.ones(2))
    values = sent("averages", {"0": torch.zeros(2), "2": elsewhere, "kept": [torch.zeros(2)]}, budget=64)
    taken = sent_or_own(values, {"0": own, "2": own, "kept": [parameter]})
    assert taken["0"].sum() == 0 and taken["2"] is own and taken["kept"][0] is parameter
    unsent = sent("object", object(), budget=8)
    assert sent_or_own(unsent, None) is unsent, "this rank has an old value"


def test_what_cant_be_made_anew_can_be_passed_on() -> None:
    passed = sent("batch", {"x": Unpacked(torch.ones(2), 2)}, budget=64)
    with pytest.raises(UnsupportedError, match=r"reads batch\['x'\] .*this Unpacked is on pipeline rank 0 alone"):
        print(passed["x"]["x"])


class Unpacked(Mapping[str, Any]):
    """Can't be constructed from a dictionary."""

    def __init__(self, x: torch.Tensor, size: int) -> None:
        self.x = x

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return 1


def test_what_steps_have_set_in_a_batch_is_hidden() -> None:
    batch, pieces = {"x": 1, "y": 2, "z": 3}, [{"x": 1, "y": 2, "z": 3} for _ in range(2)]
    before = [children(piece) for piece in pieces]
    for piece in pieces:
        piece["x"], piece["new"] = 5, 6
        del piece["y"]
    hide_changed(batch, before, pieces)
    assert batch["z"] == 3
    for key in ("x", "y", "new"):
        with pytest.raises(UnsupportedError, match=rf"reads batch\['{key}'\] .*each step has set its own"):
            print(batch[key] + 1)
    hide_changed(batch, [{"z": 4}], [batch])
    assert batch["z"] == 3, "a step that gets the whole batch changes it itself"
