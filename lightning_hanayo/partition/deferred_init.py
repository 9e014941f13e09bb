"""Computes the initial values of a model that was built on the meta device, one module at a time.

model            embedding   block 0 . . block 7   head     on meta; then each rank changes it to its own part
meta copy        embedding   block 0 . . block 7   head     as it was built, all on meta ...
initial_values               block 0.up                     ... but the module whose values are computed

A module's values come from its own `reset_parameters`, then from that of each module around it, the innermost first, up
to the LightningModule; then from Hugging Face's `_init_weights`, called for the same modules in the same order. Code
that loops over a whole model, such as GPT-2's smaller values for residual projections, runs unchanged: on meta it has
no effect and needs no memory. The random generator is seeded for each module, from the seed and the module's name, so
that values don't depend on the layout.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.ownership import Placeholder, attributes_on_meta, exchange, on_meta
from lightning_hanayo.seeds import seed_of
from lightning_hanayo.versions import version_of

_ADVICE = (
    "Give the module, or one around it up to the LightningModule, a method `reset_parameters(self)` that sets all its "
    "values, or build it with values, inside `with torch.device('cpu')`."
)


@dataclass(frozen=True)
class DeferredModule:
    """A module without values, and its parameters and buffers. One that modules share belongs to the first of them."""

    name: str
    tensors: tuple[Tensor, ...]


def is_deferred(model: nn.Module) -> bool:
    """Whether some of it was built on the meta device and has no values yet. Placeholders don't count."""
    tensors = [*model.parameters(), *model.buffers()]
    return any(t.is_meta for t in tensors) and not any(isinstance(t, Placeholder) for t in tensors)


class DeferredInit:
    """Computes and assigns the values of a whole model. Create it on all ranks, before they change the model.

    Raises:
        UnsupportedError: the model has tensors on meta that are neither parameters nor buffers.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._modules = dict(model.named_modules())
        for name, module in self._modules.items():
            for key, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    kind = type(module).__name__
                    raise UnsupportedError(
                        f"{f'{name}.{key}'.removeprefix('.')} of a {kind} was built on the meta device, but is neither "
                        f"a parameter nor a buffer. Build the {kind} inside `with torch.device('cpu')`."
                    )
        self._copy = MetaCopy(model)

    def deferred_modules(self, modules: Iterable[nn.Module]) -> list[DeferredModule]:
        """Those of `modules` that have no values, in the model's order."""
        tensors: dict[str, dict[Tensor, None]] = {}
        wanted = set(modules)
        for module in self._modules.values():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False)) if module in wanted else ()
            for tensor in own:
                if tensor.is_meta and not isinstance(tensor, Placeholder):
                    tensors.setdefault(self._copy.module_name(tensor), {})[tensor] = None
        return [DeferredModule(name, tuple(tensors[name])) for name in self._modules if name in tensors]

    def initial_values(self, module: DeferredModule) -> list[Tensor]:
        """The full values of the module's tensors, on the CPU.

        Raises:
            UnsupportedError: nothing gives the module values, or its constructor gave it values that would be lost.
        """
        blanks: dict[Tensor, Tensor] = {}
        for tensor in module.tensors:
            known = self._copy.get(tensor)
            data = torch.empty_like(known, device="cpu")
            has_nan = data.is_floating_point() or data.is_complex()  # so that unset values can be found
            blanks[tensor] = like(known, data.fill_(torch.nan) if has_nan else data.zero_())
        before = {tensor: blank._version for tensor, blank in blanks.items()}
        with self._copy.replaced(blanks), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(self._seed, module.name))
            self._initialize(module.name)
            values = {tensor: self._copy.get(tensor) for tensor in blanks}
        for tensor, value in values.items():
            self._check(tensor, value, value._version - before[tensor])
        return list(values.values())

    def assign(self, module: DeferredModule, values: Iterable[Tensor]) -> None:
        """Give the module's tensors, which stay the same Python objects, full values or this rank's shards.

        Raises:
            UnsupportedError: a parameter has hooks.
        """
        owner = self._modules[module.name]
        for tensor, value in zip(module.tensors, values, strict=True):
            if any((tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))):
                name = self._copy.name(tensor)
                raise UnsupportedError(f"{name} was built on the meta device, and would lose its hooks")
            assert tensor.shape == value.shape and tensor.dtype == value.dtype
            exchange(tensor, like(tensor, value.detach()))
        if isinstance(owner, nn.RNNBase):
            owner.flatten_parameters()  # cuDNN wants one piece of memory

    def assign_one(self, tensor: Tensor, value: Tensor) -> None:
        """Give one tensor a value, or this rank's shard of it; see `assign`."""
        self.assign(DeferredModule(self._copy.module_name(tensor), (tensor,)), [value])

    def _initialize(self, name: str) -> None:
        """Call the initialization methods of the module and of those around it."""
        names = [name]  # of "a.b.c": "a.b.c", "a.b", "a" and "", the whole model
        while names[-1]:
            names.append(names[-1].rpartition(".")[0])
        modules = [self._copy.modules[caller] for caller in names]
        for caller, module in zip(names, modules, strict=True):
            _call_first(name, caller, [getattr(module, key, None) for key in ("reset_parameters", "_reset_parameters")])
        for i, (caller, module) in enumerate(zip(names, modules, strict=True)):
            _call_first(name, caller, [getattr(outer, "_init_weights", None) for outer in modules[i:]], module)

    def _check(self, tensor: Tensor, value: Tensor, num_writes: int) -> None:
        """Check that the methods have set the whole value, and that they do all that the constructor did."""
        name, expected = self._copy.name(tensor), self._copy.num_writes[tensor]
        owner = type(self._modules[self._copy.module_name(tensor)]).__name__
        unset = value.isnan().any() if value.is_floating_point() or value.is_complex() else num_writes == 0
        if value.shape != self._copy.get(tensor).shape or value.is_meta or unset:
            raise UnsupportedError(
                f"{name} of a {owner} was built on the meta device, and nothing gives it values. {_ADVICE}"
            )
        if num_writes < expected:
            raise UnsupportedError(
                f"{name} of a {owner} was given values {expected} times when it was built on the meta device, but "
                f"{num_writes} times by `reset_parameters` and `_init_weights`: values would be lost. {_ADVICE}"
            )


def _accepts(method: Any, *arguments: object) -> bool:
    """Whether it is a method that can be called with these arguments."""
    if not inspect.ismethod(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    return True


def _call_first(name: str, caller: str, methods: Iterable[Any], *arguments: object) -> None:
    """Call the first of these methods that accepts the arguments, if there is one."""
    method = next((method for method in methods if _accepts(method, *arguments)), None)
    if method is None:
        return
    try:
        method(*arguments)
    except RuntimeError as error:
        raise UnsupportedError(
            f"{name} can't be initialized by itself: {method.__name__} of {caller or 'the whole model'} failed with "
            f"all other modules on the meta device ({error}). Build the model inside `with torch.device('cpu')`."
        ) from error


class MetaCopy:
    """A copy of a model as it is now, on the meta device, so that a few tensors at a time can get real memory.

    Tensors of the model are the keys: of each, the copy has a meta tensor in the same modules, shared in the same way.
    """

    def __init__(self, model: nn.Module) -> None:
        originals = dict(model.named_modules())
        self.modules: dict[str, nn.Module] = {name: object.__new__(type(one)) for name, one in originals.items()}
        self._names: dict[Tensor, str] = {}
        self.num_writes: dict[Tensor, int] = {}
        """how many in-place operations had written to each of the model's tensors when the copy was made"""
        self._slots: dict[Tensor, list[tuple[dict[str, Tensor], str]]] = {}
        copies = {module: self.modules[name] for name, module in originals.items()}
        for name, module in originals.items():
            vars(copies[module]).update(vars(module))
            children = {key: None if child is None else copies[child] for key, child in module._modules.items()}
            vars(copies[module])["_modules"] = children
            for attribute in ("_parameters", "_buffers"):
                tensors = vars(copies[module])[attribute] = dict(vars(module)[attribute])
                for key, tensor in tensors.items():
                    if tensor is not None:
                        self._names.setdefault(tensor, f"{name}.{key}")
                        self.num_writes.setdefault(tensor, version_of(tensor))
                        self._slots.setdefault(tensor, []).append((tensors, key))
        for tensor in self._slots:
            made = like(tensor, on_meta(tensor))
            vars(made).update(attributes_on_meta(tensor))
            self._set({tensor: made})

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

    def _set(self, replacements: Mapping[Tensor, Tensor]) -> None:
        for tensor, replacement in replacements.items():
            for tensors, key in self._slots[tensor]:
                tensors[key] = replacement


def like(tensor: Tensor, data: Tensor) -> Tensor:
    """`data` as a parameter if `tensor` is one, with the Python attributes of `tensor`."""
    made = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    vars(made).update(vars(tensor))
    return made
