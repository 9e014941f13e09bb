"""Registers `Trainer(strategy="hanayo")` with Lightning, so that users need no import of `lightning_hanayo`.

Installed a second time as the top-level module `lightning_hanayo_autoload`, whose `activate` torch calls at the end of
`import torch` (the entry-point group `torch.backends`). So it must never fail and never be slow: it imports only the
standard library, and the rest of this package only when a user asks for the strategy.

    import torch                        --> activate() puts a finder on sys.meta_path
    import lightning.pytorch.strategies --> the finder lets the other finders load it, then calls register()
    Trainer(strategy="hanayo")          --> the registry calls the factory, which imports lightning_hanayo.strategy
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
    """Register now if Lightning is loaded, otherwise as soon as it is. Never raises."""
    with contextlib.suppress(Exception):
        register()
        if not any(getattr(finder, "registers", None) == NAME for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())


def register() -> None:
    """Add the strategy to Lightning's registry. A second call, by either copy of this module, does nothing."""
    for host, factory in _FACTORIES.items():
        registry: Any = getattr(sys.modules.get(host), "StrategyRegistry", None)
        if registry is not None and NAME not in registry:
            registry.register(NAME, factory, description=DESCRIPTION)


def _create(**options: Any) -> Any:
    """The factory in the registry. It imports the strategy only when it is called."""
    from lightning_hanayo import HanayoStrategy

    return HanayoStrategy(**options)


def _refuse(**options: Any) -> Any:
    """The factory in the registry of `pytorch_lightning`, whose base classes are not those of `lightning.pytorch`."""
    raise ValueError(
        "strategy='hanayo' works with `lightning.pytorch`, but this Trainer comes from `pytorch_lightning`. These are "
        "separate packages with separate classes. Import Trainer, LightningModule and callbacks from "
        "`lightning.pytorch` (`import lightning as L`)."
    )


_FACTORIES: dict[str, Callable[..., Any]] = {
    "lightning.pytorch.strategies": _create,
    "pytorch_lightning.strategies": _refuse,
}


class _Finder(MetaPathFinder):
    """Waits for Lightning's strategies to be imported, once each, and wraps the loader that other finders find."""

    registers = NAME

    def __init__(self) -> None:
        self._awaited = set(_FACTORIES) - set(sys.modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an awaited module with its loader wrapped; None for every other module."""
        if fullname not in self._awaited:
            return None
        self._awaited.discard(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a module with `inner`, then registers the strategy and removes itself from the module."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with `inner`."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with `inner`, then register. An error in the registration must not reach the user."""
        self._inner.exec_module(module)
        with contextlib.suppress(Exception):
            module.__loader__ = self._inner
            if module.__spec__ is not None:
                module.__spec__.loader = self._inner
            register()
