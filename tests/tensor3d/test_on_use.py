"""Parts of parameters that are gathered when they are used."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.partial_values import Part
from lightning_hanayo.tensor_parallel import on_use
from lightning_hanayo.versions import version_of


@pytest.mark.parametrize(("name", "counts"), [("data", 0), ("detach", 1)])
def test_changes_of_data_raise_no_version(name: str, counts: int) -> None:
    """As of a whole parameter: Gemma 3n clamps the `.data` of one in each forward."""
    source: Any = on_use.Source(mesh=None, shard=None)  # type: ignore[arg-type]  # nothing is gathered
    part: Any = nn.Parameter(torch.tensor([-2.0, 3.0]))
    vars(part)["_part"] = Part("weight", (4,))
    before = version_of(part)
    values = on_use.alias(part, part, source)
    (values.data if name == "data" else values.detach()).clamp_(-1, 1)
    assert part.tolist() == [-1.0, 1.0] and version_of(part) == before + counts
