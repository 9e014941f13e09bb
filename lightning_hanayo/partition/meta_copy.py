"""Copies a model's modules with all tensors on the meta device, so that a few tensors at a time can get real memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_hanayo.partition.ownership import attributes_on_meta, on_meta
from lightning_hanayo.versions import version_of


class MetaCopy:
    """A copy of a model as it is now; later changes to the model don't affect it.

    Tensors of the model are the keys: of each, the copy has a meta tensor in the same modules, shared in the same way.
    """

    def __init__(self, model: nn.Module) -> None:
        originals = dict(model.named_modules())
        self.modules = {name: _shallow_copy(module) for name, module in originals.items()}
        self._names: dict[Tensor, str] = {}
        self.num_writes: dict[Tensor, int] = {}
        """how many in-place operations had written to each of the model's tensors when the copy was made"""
        self._slots: dict[Tensor, list[tuple[dict[str, Tensor], str]]] = {}
        copies = {module: self.modules[name] for name, module in originals.items()}
        for name, module in originals.items():
            children = {key: None if child is None else copies[child] for key, child in module._modules.items()}
            vars(copies[module])["_modules"] = children
            self._copy_tensors(name, module)
        self._set({tensor: _without_values(tensor) for tensor in self._slots})

    def name(self, tensor: Tensor) -> str:
        """The tensor's qualified name; if modules share it, the first one."""
        return self._names[tensor].removeprefix(".")

    def module_name(self, tensor: Tensor) -> str:
        """The name of the module that has the tensor; if several share it, of the first one."""
        return self._names[tensor].rpartition(".")[0]

    def get(self, tensor: Tensor) -> Tensor:
        """The copy's tensor that corresponds to the model's `tensor`."""
        tensors, key = self._slots[tensor][0]
        return tensors[key]

    @contextmanager
    def replaced(self, replacements: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """While the context is active, the copy has `replacements[t]` in place of the model's tensor `t`."""
        saved = {tensor: self.get(tensor) for tensor in replacements}
        self._set(replacements)
        try:
            yield
        finally:
            self._set(saved)

    def _copy_tensors(self, name: str, module: nn.Module) -> None:
        for attribute in ("_parameters", "_buffers"):
            tensors = vars(self.modules[name])[attribute] = dict(vars(module)[attribute])
            for key, tensor in tensors.items():
                if tensor is not None:
                    self._names.setdefault(tensor, f"{name}.{key}")
                    self.num_writes.setdefault(tensor, version_of(tensor))
                    self._slots.setdefault(tensor, []).append((tensors, key))

    def _set(self, replacements: Mapping[Tensor, Tensor]) -> None:
        for tensor, replacement in replacements.items():
            for tensors, key in self._slots[tensor]:
                tensors[key] = replacement


def _without_values(tensor: Tensor) -> Tensor:
    made = like(tensor, on_meta(tensor))
    vars(made).update(attributes_on_meta(tensor))
    return made


def like(tensor: Tensor, data: Tensor) -> Tensor:
    """`data` as a parameter if `tensor` is one, with the Python attributes of `tensor`."""
    made = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    vars(made).update(vars(tensor))
    return made


def _shallow_copy(module: nn.Module) -> nn.Module:
    copy: nn.Module = object.__new__(type(module))
    vars(copy).update(vars(module))
    return copy
