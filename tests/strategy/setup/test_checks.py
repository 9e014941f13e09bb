"""What can't run is refused before it starts, and the way out that an error names works."""

from typing import Literal

import pytest
import torch
from torch import nn

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.stack import find_stack
from lightning_hanayo.strategy.setup.checks import check_batch_statistics
from tests.harness import models
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer


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


class Lazy(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(models.CLASSES)


class LazyThatRuns(Lazy):
    def configure_model(self) -> None:
        self(torch.zeros(1, models.WIDTH))


@pytest.mark.parametrize("layout", [Layout(waves=2), Layout(pipe=2)], ids=str)
def test_parameters_without_a_shape_are_named_and_the_way_out_works(layout: Layout) -> None:
    loader = make_loader(models.vectors((8,)))
    message = r"no shape before they run: head\.weight, head\.bias\. .*Run the module"
    with pytest.raises(UnsupportedError, match=message):
        make_trainer(layout, max_steps=1, strategy=make_strategy(layout)).fit(Lazy(), loader)
    alone = make_trainer(Layout(), max_steps=1, strategy=make_strategy(Layout(waves=2)))
    alone.fit(LazyThatRuns(), loader)
    assert alone.global_step == 1
