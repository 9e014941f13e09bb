"""Records what a conversion changes on modules, so that a trained model can become an ordinary one again.

before    Linear     {in_features: 8}
after     Linear3D   {in_features: 8, sharding: ..., _shards: ...}
undo      Linear     {in_features: 8}
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_MISSING = object()


@dataclass
class ModuleChanges:
    """The class of each module, and those of its attributes that were changed, as they were before."""

    _before: dict[nn.Module, tuple[type[nn.Module], dict[str, Any]]] = field(default_factory=dict)

    @contextmanager
    def recorded(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Record what happens to these modules inside the context, except in their parameters and buffers."""
        before = {module: (type(module), dict(vars(module))) for module in modules}
        yield
        for module, (kind, attributes) in before.items():
            names = {*attributes, *vars(module)}
            old = {name: attributes.get(name, _MISSING) for name in names}
            self._before[module] = kind, {n: v for n, v in old.items() if vars(module).get(n, _MISSING) is not v}

    def undo(self, copies: Mapping[nn.Module, nn.Module] | None = None) -> None:
        """Restore the modules; if given, their `copies` instead, of those that the model still has."""
        for module, (kind, attributes) in self._before.items():
            restored = module if copies is None else copies.get(module)
            if restored is None:
                continue
            restored.__class__ = kind
            for name, value in attributes.items():
                if value is _MISSING:
                    vars(restored).pop(name, None)
                else:
                    vars(restored)[name] = value
        if copies is None:
            self._before.clear()
