"""Each rank loads its own entries of a state dict, in a cube its shards, and finds values that are no numbers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing.load_state import Source, load, not_finite
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.partition.ownership import replace_with_placeholders
from tests.checkpoint.folders import part_of

SOURCE = Source("last.ckpt")


def model() -> nn.Module:
    return nn.ModuleList(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)) for _ in range(2))


def second_rank(module: nn.Module) -> nn.Module:
    first, second = module.children()
    replace_with_placeholders(module, set(second.parameters()), buffers_of=first.modules())
    return module


def test_placeholders_stay_and_the_rest_is_loaded() -> None:
    whole, own = model().state_dict(), second_rank(model())
    load(own, whole, None, SOURCE, strict=True)
    found = {name: value for name, value in own.state_dict().items() if not value.is_meta}
    assert found.keys() == {name for name in whole if name.startswith("1.")}
    assert all(torch.equal(value, whole[name]) for name, value in found.items())
    with pytest.raises(CheckpointError, match="last.ckpt can't be loaded into this ModuleList: .*Unexpected"):
        load(own, whole | {"more": torch.ones(1)}, None, SOURCE, strict=True)


class Rows:
    """A cube of two ranks, of which this is the one with the odd rows of matrices."""

    def __init__(self, module: nn.Module) -> None:
        self.whole_shapes: Mapping[Tensor, tuple[int, ...]] = {
            p: tuple(p.shape) for p in module.parameters() if p.dim() > 1
        }
        for parameter in self.whole_shapes:
            parameter.data = parameter.data[1::2].clone()

    def region(self, parameter: Tensor) -> Region:
        num_rows, num_columns = self.whole_shapes[parameter]
        return Region.of_entries([range(1, num_rows, 2), range(num_columns)])


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_rank_of_a_cube_loads_its_shards_and_reads_no_others(is_stored: bool) -> None:
    whole, module = model().state_dict(), model()
    cube, num_read = Rows(module), []

    def stored(value: Tensor) -> Tensor:
        def read(region: Region | None) -> Tensor:
            part = value.clone() if region is None else part_of(value, region)
            num_read.append(part.numel())
            return part

        return StoredTensor.of(value.shape, value.dtype, read) if is_stored else value

    load(module, {n: stored(v) for n, v in whole.items()}, cube, SOURCE, strict=True)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, whole[name][1::2] if parameter.dim() > 1 else whole[name]), name
    held = sum(value.numel() for value in module.state_dict().values())
    assert sum(num_read) == (held if is_stored else 0)


class Translates(nn.Linear):
    """Knows an older name of its weight, whose rows were in another order."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}older").flip(0)
        super()._load_from_state_dict(state, prefix, *arguments)


@pytest.mark.parametrize("is_stored", [True, False])
def test_modules_translate_whole_values_before_a_shard_is_taken(is_stored: bool) -> None:
    module, value = nn.Sequential(Translates(2, 4, bias=False)), torch.arange(8.0).view(4, 2)
    older = StoredTensor.around(value) if is_stored else value
    load(module, {"0.older": older}, Rows(module), SOURCE, strict=True)
    assert torch.equal(module[0].weight, value.flip(0)[1::2])
    module = nn.Sequential(Translates(2, 4, bias=False))
    replace_with_placeholders(module, set())
    load(module, {"0.older": older}, None, SOURCE, strict=True)  # nor does a rank without values warn


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.complex64, torch.float8_e5m2])
def test_parameters_that_would_not_be_finite_are_named(value: float, dtype: torch.dtype) -> None:
    module = model()
    state = {name: one.to(dtype) if one.dim() else one for name, one in module.state_dict().items()}
    assert not_finite(module, state, None) == []
    bad = torch.zeros(4, 2)
    bad[3, 1] = value
    state["1.0.weight"] = bad.to(dtype)
    state["0.1.running_var"] = torch.full((4,), value)  # a buffer may be anything, such as a mask of -inf
    assert not_finite(module, state, None) == ["1.0.weight"]


def test_large_numbers_are_finite() -> None:
    module = nn.Linear(2, 2, bias=False)
    assert not_finite(module, {"weight": torch.full((2, 2), 3e38)}, None) == []
