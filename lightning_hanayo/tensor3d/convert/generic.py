"""Converts a block whose class isn't registered: each linear layer by itself, and its dropouts' random streams."""

from collections.abc import Iterator

from torch import nn

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.linear_modules import is_linear
from lightning_hanayo.tensor3d.convert.eligibility import ParameterOwners, reason_ineligible
from lightning_hanayo.tensor3d.convert.generic_linear import Communicated, cheapest, parallelize_generic_linear
from lightning_hanayo.tensor3d.convert.report import NOT_CONVERTED, ReportRow, describe
from lightning_hanayo.tensor3d.layers.dropout import parallelize_dropout
from lightning_hanayo.tensor3d.layers.linear import features
from lightning_hanayo.tensor3d.stage_context import StageContext

_OUTCOMES: dict[Communicated, str] = {
    "activations": "3-D, activations exchanged around it",
    "weight": "weight sharded over all ranks, gathered whole",
}


class GenericBlock:
    """One block.

    Args:
        block: of any class.
        number: the block's, in the stack.
        owners: of all parameters of the stack.
        sizes: the mesh's.
        tokens: an estimate of the tokens of a micro-batch.
    """

    def __init__(self, block: nn.Module, number: int, owners: ParameterOwners, sizes: MeshSizes, tokens: int) -> None:
        self.block = block
        self.number = number
        self._reasons: dict[str, str] = {}
        self._communicated: dict[str, Communicated] = {}
        for path, module in block.named_modules():
            if is_linear(module) and (reason := reason_ineligible(module, owners)) is None:
                self._communicated[path] = cheapest(features(module), tokens, sizes)
            elif is_linear(module):
                self._reasons[path] = str(reason)
            elif any(parameter is not None for parameter in module._parameters.values()):
                self._reasons[path] = "a subclass" if isinstance(module, nn.Linear) else "no linear layer"

    def report_rows(self) -> Iterator[ReportRow]:
        """What becomes of each module with parameters, and of dropouts."""
        for path, module in self.block.named_modules():
            if path in self._communicated:
                yield ReportRow(self.number, path, describe(module), _OUTCOMES[self._communicated[path]])
            elif path in self._reasons:
                yield ReportRow(self.number, path, describe(module), NOT_CONVERTED, self._reasons[path])
            elif type(module) is nn.Dropout:
                yield ReportRow(self.number, path, describe(module), "random stream of each rank")

    def install(self, context: StageContext) -> None:
        """Convert what can be, in place."""
        for path, communicated in self._communicated.items():
            parallelize_generic_linear(self.block.get_submodule(path), context, communicated)
        for module in self.block.modules():
            if type(module) is nn.Dropout:
                parallelize_dropout(module, context)
