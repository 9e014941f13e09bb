"""What was recorded on a module is undone: on the module itself, or on a copy of it."""

import copy

from torch import nn

from lightning_hanayo.tensor_parallel.convert.conversion import ModuleChanges


class Other(nn.Linear):
    """What a linear layer becomes."""


def changed() -> tuple[nn.Module, ModuleChanges]:
    module, changes = nn.Linear(2, 2), ModuleChanges()
    module.kept = "before"  # type: ignore[assignment]
    with changes.recorded([module]):
        module.__class__ = Other
        module.in_features, module.added = 1, True  # type: ignore[assignment]
    module.kept = "after"  # type: ignore[assignment]
    return module, changes


def is_restored(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.in_features == 2
        and module.kept == "after"  # what the conversion didn't touch stays
        and not hasattr(module, "added")
    )


def test_undone_on_the_module() -> None:
    module, changes = changed()
    changes.undo()
    assert is_restored(module)


def test_undone_on_a_copy() -> None:
    module, changes = changed()
    copied = copy.deepcopy(module)
    changes.undo({module: copied})
    assert is_restored(copied) and type(module) is Other and module.in_features == 1
