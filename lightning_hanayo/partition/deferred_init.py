"""The blueprint: a model that was built on the meta device, of which one module at a time gets values.

model        embedding   block 0 . . block 7   head          all on meta; ranks change it to what they hold
blueprint    embedding   block 0 . . block 7   head          as it was, all on meta ...
build                    block 0.up                          ... but the module that is being built

A module's values are what its `reset_parameters` gives it, then those of the modules around it, from the inside out, up
to the LightningModule; then Hugging Face's `_init_weights`, for the same modules. Code that goes over a whole model, as
GPT-2's smaller values for what is added to the residual sum, runs as it stands: on meta it costs and leaves nothing.
Random numbers begin anew with each module, from the seed and the module's name: values depend on no layout.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.ownership import Placeholder
from lightning_hanayo.seeds import seed_of

_ADVICE = (
    "Give the module, or one around it up to the LightningModule, a method `reset_parameters(self)` that does all of "
    "it, or build it outside of `with torch.device('meta')`."
)


@dataclass(frozen=True)
class UnbuiltModule:
    """A module without values, and its parameters and buffers as the model has them.

    What several modules share is the first one's.
    """

    name: str
    tensors: tuple[Tensor, ...]


def is_unbuilt(model: nn.Module) -> bool:
    """Whether any of it lies on meta since it was made, and not because it lies on another rank."""
    tensors = [*model.parameters(), *model.buffers()]
    return any(t.is_meta for t in tensors) and not any(isinstance(t, Placeholder) for t in tensors)


class DeferredInit:
    """Made on all ranks before they change the model.

    Args:
        model: the whole model.
        seed: of all values.

    Raises:
        UnsupportedError: it has tensors on meta that are neither parameters nor buffers.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._modules = dict(model.named_modules())
        for name, module in self._modules.items():
            _check_attributes(name, module)
        self._writes: dict[Tensor, int] = {}
        self._names: dict[Tensor, str] = {}
        self._places: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
        self._twins = {name: _twin(module) for name, module in self._modules.items()}
        self._connect()

    def unbuilt(self, modules: Iterable[nn.Module]) -> list[UnbuiltModule]:
        """Those of `modules` that have no values, in the model's order."""
        tensors: dict[str, dict[Tensor, None]] = {}
        own = set(modules)
        for module in self._modules.values():
            for tensor in _tensors(module).values() if module in own else ():
                if tensor.is_meta and not isinstance(tensor, Placeholder):
                    tensors.setdefault(self._names[tensor].rpartition(".")[0], {})[tensor] = None
        return [UnbuiltModule(name, tuple(tensors[name])) for name in self._modules if name in tensors]

    def build(self, module: UnbuiltModule) -> list[Tensor]:
        """The whole values of its tensors, on the CPU.

        Raises:
            UnsupportedError: nothing gives it values, or something else did so when the model was made.
        """
        blanks = {tensor: _blank(self._standing_for(tensor)) for tensor in module.tensors}
        before = {tensor: blank._version for tensor, blank in blanks.items()}
        with self._standing(blanks), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(self._seed, module.name))
            self._initialize(module.name)
            values = {tensor: self._standing_for(tensor) for tensor in blanks}
        for tensor, value in values.items():
            self._check(tensor, value, value._version - before[tensor])
        return list(values.values())

    def fill(self, module: UnbuiltModule, values: Iterable[Tensor]) -> None:
        """Give its tensors their values, whole or this rank's part, on any device. They stay the same objects.

        Raises:
            UnsupportedError: a parameter has hooks.
        """
        owner = self._modules[module.name]
        if isinstance(owner, nn.RNNBase):
            owner._flat_weight_refs.clear()  # what is referred to weakly can't be exchanged; made again below
        for tensor, value in zip(module.tensors, values, strict=True):
            if any((tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))):
                raise UnsupportedError(f"{self._name(tensor)} was built on the meta device, and would lose its hooks")
            assert tensor.shape == value.shape and tensor.dtype == value.dtype
            torch.utils.swap_tensors(tensor, _like(tensor, value.detach()))
        if isinstance(owner, nn.RNNBase):
            owner._init_flat_weights()

    def _connect(self) -> None:
        """Make the twins a model of their own: of twins, with tensors on meta, shared as the model's are."""
        twin_of = {module: self._twins[name] for name, module in self._modules.items()}
        for name, module in self._modules.items():
            twin = vars(self._twins[name])
            twin["_modules"] = {key: child and twin_of[child] for key, child in module._modules.items()}
            for kind in ("_parameters", "_buffers"):
                twin[kind] = dict(vars(module)[kind])
                for key, tensor in twin[kind].items():
                    if tensor is not None:
                        self._names.setdefault(tensor, f"{name}.{key}")
                        self._writes.setdefault(tensor, tensor._version)
                        self._places.setdefault(tensor, []).append((twin[kind], key))
        for tensor in self._places:
            self._put(tensor, _like(tensor, torch.empty_like(tensor, device="meta")))

    def _name(self, tensor: Tensor) -> str:
        return self._names[tensor].removeprefix(".")

    def _put(self, tensor: Tensor, stands_for_it: Tensor) -> None:
        for tensors, key in self._places[tensor]:
            tensors[key] = stands_for_it

    def _standing_for(self, tensor: Tensor) -> Tensor:
        tensors, key = self._places[tensor][0]
        value: Tensor = tensors[key]
        return value

    @contextmanager
    def _standing(self, blanks: dict[Tensor, Tensor]) -> Iterator[None]:
        empty = {tensor: self._standing_for(tensor) for tensor in blanks}
        for tensor, blank in blanks.items():
            self._put(tensor, blank)
        try:
            yield
        finally:
            for tensor, stand_in in empty.items():
                self._put(tensor, stand_in)

    def _initialize(self, name: str) -> None:
        around = [name, *_around(name)]
        for where in around:
            twin: Any = self._twins[where]
            for method in ("reset_parameters", "_reset_parameters"):
                if _takes(getattr(twin, method, None)):
                    _call(name, where, getattr(twin, method))
                    break
        for i, where in enumerate(around):
            families = (getattr(self._twins[outer], "_init_weights", None) for outer in around[i:])
            family = next((method for method in families if _takes(method, self._twins[where])), None)
            if family is not None:
                _call(name, where, family, self._twins[where])

    def _check(self, tensor: Tensor, value: Tensor, writes: int) -> None:
        full = self._name(tensor)
        kind = type(self._modules[self._names[tensor].rpartition(".")[0]]).__name__
        unset = value.isnan().any() if value.is_floating_point() or value.is_complex() else writes == 0
        if value.shape != self._standing_for(tensor).shape or value.is_meta or unset:
            raise UnsupportedError(
                f"{full} of a {kind} was built on the meta device, and nothing gives it values. {_ADVICE}"
            )
        if writes < self._writes[tensor]:
            raise UnsupportedError(
                f"{full} of a {kind} was given values {self._writes[tensor]} times when it was built on the meta "
                f"device, but {writes} times by `reset_parameters` and `_init_weights`: what an __init__ does besides "
                f"would be lost. {_ADVICE}"
            )


def _twin(module: nn.Module) -> nn.Module:
    twin: nn.Module = object.__new__(type(module))
    vars(twin).update(vars(module))
    return twin


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _check_attributes(name: str, module: nn.Module) -> None:
    for key, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise UnsupportedError(
                f"{f'{name}.{key}'.removeprefix('.')} of a {type(module).__name__} was built on the meta device, but "
                f"is neither a parameter nor a buffer: nothing can give it values. Build the {type(module).__name__} "
                f"outside of `with torch.device('meta')`."
            )


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    """`data` as what `tensor` is, with its marks."""
    made = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    vars(made).update(vars(tensor))
    return made


def _blank(tensor: Tensor) -> Tensor:
    """No values yet; floating-point ones are NaN, so that what stays unset is seen."""
    data = torch.empty_like(tensor, device="cpu")
    return _like(tensor, data.fill_(torch.nan) if data.is_floating_point() or data.is_complex() else data.zero_())


def _around(name: str) -> Iterator[str]:
    """The modules around one, from the inside out: "a.b.c" gives "a.b", "a" and "", the whole model."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _takes(method: Any, *arguments: object) -> bool:
    """Whether it is a method that can be called with these."""
    if not inspect.ismethod(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    return True


def _call(name: str, where: str, method: Callable[..., object], *arguments: object) -> None:
    try:
        method(*arguments)
    except RuntimeError as error:
        raise UnsupportedError(
            f"{name} can't be built by itself: {method.__name__} of {where or 'the whole model'} failed, where all "
            f"other modules lie on the meta device ({error}). Let it read no values but the module's own, or build the "
            f"model outside of `with torch.device('meta')`."
        ) from error
