"""Watches a module in one process: in which order the forward uses parameters, and which attributes it changes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class ModuleWatch:
    """What the first step of a module has done, as far as another process can't see it."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[str, None] = {}
        """names, in the order of their modules' forwards"""
        self._module = module
        self._before = _attributes(module)
        names = {parameter: name for name, parameter in module.named_parameters()}

        def note(part: nn.Module, _: Any) -> None:
            self.parameters.update(dict.fromkeys(names[one] for one in part.parameters(recurse=False) if one in names))

        self._hooks = [part.register_forward_pre_hook(note) for part in module.modules()]

    def changed_attributes(self) -> list[str]:
        """The attributes that differ from those before: a count, a stored tensor, a longer list. Ends the watch."""
        for hook in self._hooks:
            hook.remove()
        now = _attributes(self._module)
        return [name for name, value in now.items() if _differs(self._before.get(name), value)]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The public attributes of all modules, by qualified name; of containers the length."""
    return {
        f"{path}.{name}".removeprefix("."): len(value) if isinstance(value, (list, dict, set)) else value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if not name.startswith("_") and name not in ("training", "log", "training_step", "configure_model")
    }


def _differs(before: Any, now: Any) -> bool:
    if before is now:
        return False
    return not (isinstance(now, (int, float, str)) and before == now)


class RoundingWatch(TorchDispatchMode):
    """While it is active: whether user code rounds a tensor of `dtype` to a lower precision, as norms of Llama do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.has_rounded = False
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(result, Tensor) and result.is_floating_point():
            self.has_rounded |= args[0].dtype == self._dtype and result.itemsize < args[0].itemsize
        return result
