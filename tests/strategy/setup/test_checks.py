"""What can't run is refused before it starts, and the way out that an error names works."""

from typing import Literal

import pytest
from torch import nn

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.stack import find_stack
from lightning_hanayo.strategy.setup.checks import check_batch_statistics


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.linear = norm(4), nn.Linear(4, 4)


def model(norm: type[nn.Module]) -> nn.Module:
    """BatchNorm before blocks with a norm."""
    return nn.ModuleDict({"stem": nn.BatchNorm1d(4), "blocks": nn.ModuleList([Block(norm), Block(norm)])})


@pytest.mark.parametrize("outside", ["share", "replicate"])
def test_batch_norm_in_a_block_is_named_before_one_that_an_option_allows(
    outside: Literal["share", "replicate"],
) -> None:
    one = model(nn.BatchNorm1d)
    with pytest.raises(UnsupportedError, match=r"^blocks.0.norm .*Within the stack use LayerNorm"):
        check_batch_statistics(one, find_stack(one), HanayoStrategy(cube_outside=outside).options)


def test_batch_norm_outside_the_stack_is_allowed_by_the_option_that_the_error_names() -> None:
    one = model(nn.LayerNorm)
    with pytest.raises(UnsupportedError, match=r"^stem .*Leave out step='microbatch'"):
        check_batch_statistics(one, find_stack(one), HanayoStrategy(step="microbatch").options)
    check_batch_statistics(one, find_stack(one), HanayoStrategy().options)
