"""Makes `pytorch_lightning` another name of `lightning.pytorch`, so that packages that import it get the same classes.

    import lightning_hanayo.pytorch_lightning    first, before anything that imports pytorch_lightning
    import darts                                 its LightningModules, callbacks and Trainers are lightning.pytorch's

`pytorch_lightning` need not be installed. `lightning_fabric` becomes another name of `lightning.fabric` likewise.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from typing_extensions import override

from lightning_hanayo.errors import HanayoError

_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _OtherName(MetaPathFinder, Loader):
    """Finds each module of the two packages under its other name."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package not in _NAMES:
            return None
        found = find_spec(f"{_NAMES[package]}.{rest}" if rest else _NAMES[package])
        return None if found is None else ModuleSpec(fullname, self, loader_state=found.name)

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, with the name of its own spec in the place of that by which it's found."""
        module = import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        """The module has run: importlib has only put the other name's spec in the place of its own."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


if loaded := [name for name in _NAMES if name in sys.modules]:
    raise HanayoError(
        f"{loaded[0]} was imported before lightning_hanayo.pytorch_lightning, so that code has classes of another copy "
        f"of Lightning. Put `import lightning_hanayo.pytorch_lightning` first, above what imports {loaded[0]}."
    )
import_module("lightning.pytorch")  # with torch, which puts the finder of `_autoload` first: this one goes before it
sys.meta_path.insert(0, _OtherName())
