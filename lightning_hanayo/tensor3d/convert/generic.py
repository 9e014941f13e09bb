"""The unknown block: its linear layers convert by themselves, its dropouts draw on the rank's own stream."""

from collections.abc import Iterator

from torch import nn

from lightning_hanayo.linear_modules import is_linear
from lightning_hanayo.tensor3d.convert.eligibility import Owners, obstacle
from lightning_hanayo.tensor3d.convert.generic_linear import Travel, cheapest, spread_rows
from lightning_hanayo.tensor3d.convert.report import Row, kind_of
from lightning_hanayo.tensor3d.divisibility import Grid3
from lightning_hanayo.tensor3d.layers.dropout import spread_dropout
from lightning_hanayo.tensor3d.layers.linear import features
from lightning_hanayo.tensor3d.stage_context import StageContext

_WHAT: dict[Travel, str] = {"rows": "3-D, own rows", "weight": "weight over all ranks"}


class GenericBlock:
    """One block.

    Args:
        block: of any class.
        number: the block's, in the stack.
        owners: of all parameters of the stack.
        sizes: the grid's.
        tokens: a guess at a micro-batch's.
    """

    def __init__(self, block: nn.Module, number: int, owners: Owners, sizes: Grid3, tokens: int) -> None:
        self.block = block
        self.number = number
        self._why_not: dict[str, str] = {}
        self._travel: dict[str, Travel] = {}
        for path, module in block.named_modules():
            if is_linear(module) and (why := obstacle(module, owners)) is None:
                self._travel[path] = cheapest(features(module), tokens, sizes)
            elif is_linear(module):
                self._why_not[path] = str(why)
            elif any(parameter is not None for parameter in module._parameters.values()):
                self._why_not[path] = "a subclass" if isinstance(module, nn.Linear) else "no linear layer"

    def rows(self) -> Iterator[Row]:
        """What becomes of each module with parameters, and of dropouts."""
        for path, module in self.block.named_modules():
            if path in self._travel:
                yield Row(self.number, path, kind_of(module), _WHAT[self._travel[path]])
            elif path in self._why_not:
                yield Row(self.number, path, kind_of(module), "dense", self._why_not[path])
            elif type(module) is nn.Dropout:
                yield Row(self.number, path, kind_of(module), "own random stream")

    def install(self, setting: StageContext) -> None:
        """Spread what can be, in place."""
        for path, travel in self._travel.items():
            spread_rows(self.block.get_submodule(path), setting, travel)
        for module in self.block.modules():
            if type(module) is nn.Dropout:
                spread_dropout(module, setting)
