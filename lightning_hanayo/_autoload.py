"""The registration: makes `Trainer(strategy="hanayo")` known to Lightning without an import of `lightning_hanayo`.

Installed a second time as the top-level module `lightning_hanayo_autoload`, whose `activate` torch calls at the end of
`import torch` (the entry-point group `torch.backends`). So it must never fail and never be slow: it imports the
standard library only, and nothing else of this package until a user asks for the strategy.

    import torch --> activate() --> a finder on sys.meta_path, waiting
    import lightning.pytorch.strategies --> the finder lets the others load it, and calls register()
    Trainer(strategy="hanayo") --> the registry calls the factory --> import lightning_hanayo.strategy
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "hanayo"
DESCRIPTION = "Wave pipelines and 3-D tensor parallelism, in `lightning.pytorch`"


def activate() -> None:
    """Register where Lightning is loaded already, and elsewhere as soon as it is. Never raises."""
    with contextlib.suppress(Exception):
        register()
        if not any(getattr(finder, "registers", None) == NAME for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())


def register() -> None:
    """Put the strategy into Lightning's registry, once: a second call, by whichever copy of this module, is idle."""
    for host, factory in _FACTORIES.items():
        registry: Any = getattr(sys.modules.get(host), "StrategyRegistry", None)
        if registry is not None and NAME not in registry:
            registry.register(NAME, factory, description=DESCRIPTION)


def _create(**options: Any) -> Any:
    """The factory in the registry. Importing the strategy is left to the moment in which someone wants one."""
    from lightning_hanayo import HanayoStrategy

    return HanayoStrategy(**options)


def _refuse(**options: Any) -> Any:
    """The factory in the other Lightning's registry, whose strategies and modules are other classes than ours."""
    raise ValueError(
        "strategy='hanayo' plays in `lightning.pytorch`, and this Trainer comes from `pytorch_lightning`: the two are "
        "separate packages with separate classes. Import Trainer, LightningModule and callbacks from "
        "`lightning.pytorch` (`import lightning as L`)."
    )


_FACTORIES: dict[str, Callable[..., Any]] = {
    "lightning.pytorch.strategies": _create,
    "pytorch_lightning.strategies": _refuse,
}


class _Finder(MetaPathFinder):
    """Finds nothing by itself: has the other finders find Lightning's strategies, and watches them load, once each."""

    registers = NAME

    def __init__(self) -> None:
        self._awaited = set(_FACTORIES) - set(sys.modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the others find for an awaited module, its loader wrapped; None for every other module."""
        if fullname not in self._awaited:
            return None
        self._awaited.discard(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a module as `inner` does, then registers, and leaves no trace on the module."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As `inner`."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As `inner`, and then the registration; a failure of ours is not the user's."""
        self._inner.exec_module(module)
        with contextlib.suppress(Exception):
            module.__loader__ = self._inner
            if module.__spec__ is not None:
                module.__spec__.loader = self._inner
            register()
