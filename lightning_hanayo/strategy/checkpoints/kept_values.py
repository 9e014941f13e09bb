"""Keeps what a checkpoint has for a model until the model is cut; then each rank reads its part.

Lightning         resume_start   on_load_checkpoint   load_model_state_dict   strategy.setup
this package      headers read   may change entries   entries are kept        checked, cut, each rank reads its part
"""

from collections.abc import Collection, Mapping
from copy import copy
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing import load_state
from lightning_hanayo.dist_checkpointing.load_state import Sharding, Source, check_fit
from lightning_hanayo.errors import CheckpointError, listed
from lightning_hanayo.strategy.joining import on_all_ranks, with_common_errors
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.versions import identity_of


class KeptValues:
    """A state dict for a module, whole or cut.

    Args:
        module: its LightningModule.
        state: what a checkpoint has for it. It may be changed afterwards: this keeps the entries of now.
        source: where it comes from.
        options: those of the strategy.
        strict: whether all names must be the same.
    """

    def __init__(
        self, module: nn.Module, state: Mapping[str, Any], source: Source, options: Options, *, strict: bool
    ) -> None:
        self._state: Any = copy(state)  # with `_metadata`, the versions of modules' entries, which hooks ask for
        self._source = source
        self._options = options
        self._strict = strict
        self._versions = _versions(module)
        self._is_scanned = False

    @property
    def names(self) -> Collection[str]:
        """Of all entries."""
        return set(self._state)

    def drop_replaced(self, module: nn.Module) -> None:
        """Called before the module changes: leave out what user code has given other values since.

        A callback, such as one that averages weights, loads others in its `on_load_checkpoint`.
        """
        current = _tensors(module)
        for name, version in _versions(module).items():
            if name in self._state and version != self._versions.get(name, version):
                self._state[name] = current[name]

    def check(self, module: nn.Module, cube: Sharding | None) -> None:
        """Compare names, shapes and dtypes. Called by all ranks, before a value changes.

        Raises:
            CheckpointError: on all ranks, what doesn't fit.
        """
        has_masters = self._options.master_weights is not None
        expected = load_state.entries(module, cube, has_masters=has_masters)
        accepted = check_fit(
            expected, self._state, self._source, module, strict=self._strict, accept=self._options.load_anyway
        )
        for line in accepted:
            rank_zero_warn(line)

    def put_in(self, module: nn.Module, cube: Sharding | None) -> None:
        """Read this rank's part of the values into the module. Called by all ranks of the world.

        Raises:
            CheckpointError: on all ranks, if one can't read its part, or would get weights that are no numbers.
        """
        if not self._is_scanned:
            found = on_all_ranks(lambda: load_state.not_finite(module, self._state, cube))
            names = sorted({name for names in found for name in names})
            message = f"{self._source} has NaN or infinite values in {listed(names)}"
            if names and "nan" not in self._options.load_anyway:
                raise CheckpointError(
                    f"{message}: the training had failed before it was saved. Load an earlier checkpoint, or accept "
                    f"them: HanayoStrategy(load_anyway=('nan',)). No value was changed."
                )
            if names:
                rank_zero_warn(f"{message}: accepted")
            self._is_scanned = True
        with_common_errors(lambda: load_state.load(module, self._state, cube, self._source, strict=self._strict))


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The tensor that each name of the module stands for, and how often it was written."""
    return {name: identity_of(tensor) for name, tensor in _tensors(module).items()}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
