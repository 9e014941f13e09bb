"""A pretended GPU: tensors in host memory that say they are on a GPU, and refuse to be mixed with those that don't.

    x = torch.zeros(3, device="cuda")    in host memory; x.device is cuda:0, and so is that of what is computed from it
    x + torch.zeros(3)                   DeviceMixError, as on a GPU
    x + torch.zeros(())                  works, as on a GPU: the number is passed to the kernel

A storage carries the mark, so views, `param.data = ...` and autograd work as on the CPU; values are real ones. A mode
that sees every operation compares the marks of what it reads. What is different from a GPU: nothing runs beside the
host, and kernels are those of the CPU.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.trace_rules
import torch.distributed as dist
import torch.utils._device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CARD = torch.device("cuda", 0)
_REAL_DEVICE: Callable[[Tensor], torch.device] = Tensor.device.__get__  # type: ignore[attr-defined]
_MAKERS = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "logspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "scalar_tensor",
    "tensor", "zeros", "zeros_like",
)  # fmt: skip
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_BETWEEN_DEVICES = ("copy_", "set_", "index", "index_put", "index_put_", "_index_put_impl_")
_WITH_NUMBERS = ("where", "masked_fill", "masked_fill_", "fill_", "index_fill_", "lerp_", "lerp")
"""besides elementwise operations, those that read numbers of the host"""


class DeviceMixError(RuntimeError):
    """An operation was given tensors of the CPU and of the GPU."""


def is_on_card(tensor: Tensor) -> bool:
    """Whether the tensor says it is on the pretended GPU."""
    try:
        return hasattr(tensor.untyped_storage(), "on_card")
    except (NotImplementedError, RuntimeError):
        return False


def put_on_card(tensor: Tensor) -> Tensor:
    """Mark the tensor's storage."""
    tensor.untyped_storage().on_card = True  # type: ignore[attr-defined]
    return tensor


def _is_meta(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return _REAL_DEVICE(tensor).type == "meta"


def _is_card(device: Any) -> bool:
    if device is None:
        return False
    if isinstance(device, int):
        return True
    device = torch.device(device)
    assert device.index in (None, 0), f"there is one card, not {device}"
    return device.type == "cuda"


class _Check(TorchDispatchMode):
    """Compares the devices of what an operation reads, and marks what it makes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default and not isinstance(args[0], Tensor):
            return torch.scalar_tensor(
                args[0], dtype=torch.float64
            )  # a number in a graph; modes see it without a tensor
        read = args, {name: value for name, value in kwargs.items() if name != "lr"}  # read by the host
        tensors = [one for one in tree_leaves(read) if isinstance(one, Tensor) and not _is_meta(one)]
        on_card = [is_on_card(one) for one in tensors]
        name = func.overloadpacket.__name__
        if any(on_card) and not all(on_card) and name not in _BETWEEN_DEVICES:
            self._refuse_mix(func, name, args, tensors, on_card)
        if func.namespace == "c10d" and any(on_card):
            _refuse_gloo(args)
        target = any(on_card) and func.namespace != "c10d"
        random = torch.Tag.nondeterministic_seeded in func.tags and target and kwargs.get("generator") is None
        with _random_numbers_of_card() if random else nullcontext():
            out = func(*args, **kwargs)
        if target:
            known = {one.untyped_storage()._cdata for one in tensors}
            for one in tree_leaves(out):
                if isinstance(one, Tensor) and not _is_meta(one) and one.untyped_storage()._cdata not in known:
                    put_on_card(one)
        return out

    def _refuse_mix(self, func: Any, name: str, args: Any, tensors: Sequence[Tensor], on_card: Sequence[bool]) -> None:
        numbers = all(one.dim() == 0 for one, there in zip(tensors, on_card, strict=True) if not there)
        writes_host = func._schema.is_mutable and isinstance(args[0], Tensor) and not is_on_card(args[0])
        elementwise = torch.Tag.pointwise in func.tags or name in _WITH_NUMBERS or name.startswith("_foreach_")
        if numbers and elementwise and not writes_host:
            return
        shapes = [f"{'cuda:0' if there else 'cpu'} {list(t.shape)}" for t, there in zip(tensors, on_card, strict=True)]
        raise DeviceMixError(f"{func}: expected all tensors to be on the same device, got {', '.join(shapes)}")


def _refuse_gloo(args: Any) -> None:
    """Groups of gloo alone carry tensors of the CPU: gloo has no messages between GPUs, and the host would wait."""
    for one in args:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in one._type().qualified_name():
            group = dist.ProcessGroup.unbox(one)
            if group is not dist.group.WORLD and dist.get_backend(group) == "gloo":
                raise DeviceMixError(f"a tensor on cuda:0 is sent over gloo, in group {group.group_desc!r}")


@contextmanager
def _random_numbers_of_card() -> Iterator[None]:
    """The calls of this thread draw from the card's own generator."""
    own = torch.cuda.default_generators[0]
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


class _Moved(torch.autograd.Function):
    """A copy on the other device; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _other_side(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _other_side(gradient)


def _other_side(tensor: Tensor) -> Tensor:
    there = is_on_card(tensor)
    host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype) if not tensor.is_meta else tensor
    host = host if there else put_on_card(host)
    return host.copy_(tensor.detach())


def _patched_to(to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = args[0].device, args[0].dtype
        copy = kwargs.get("copy", False)
        named = {name: value for name, value in kwargs.items() if name in ("device", "dtype")}
        device, dtype, _, _ = torch._C._nn._parse_to(*[one for one in args if not isinstance(one, bool)], **named)
        if device is None or device.type == "meta" or _is_meta(self):
            return to(self, *args, **kwargs)
        result = self
        if _is_card(device) != is_on_card(self):
            result = _Moved.apply(self) if self.requires_grad and torch.is_grad_enabled() else _other_side(self)
            copy = False
        return to(result, dtype=dtype or result.dtype, copy=copy) if dtype is not None or copy else result

    return moved


def _patched_maker(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device, generator = kwargs.get("device"), kwargs.get("generator")
        where = "cuda" if _is_card(device) else "cpu"
        kwargs.pop("pin_memory", None)  # no driver pins it
        if generator is not None and generator.device.type != where:
            raise DeviceMixError(f"{make.__name__}: expected a {where} generator, got one of {generator.device}")
        if where == "cpu":
            result = make(*args, **kwargs)
            return result.cpu() if device is not None and torch.device(device).type == "cpu" else result
        with _random_numbers_of_card() if "rand" in make.__name__ and generator is None else nullcontext():
            return put_on_card(make(*args, **kwargs | {"device": "cpu"}))

    return made


class _Generator(torch.Generator):
    """Says the device that it was made for."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls)
        made.made_for = CARD if _is_card(device) else torch.device("cpu")  # type: ignore[attr-defined]
        return made

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.made_for  # type: ignore[attr-defined,no-any-return]


class _Stream:
    device, cuda_stream = CARD, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event


class _Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return (end.time - self.time) * 1e3


def _cuda() -> dict[str, Any]:
    own, stream = _Generator("cuda"), _Stream()
    nothing = lambda *_, **__: None  # noqa: E731
    return {
        "default_generators": (own,), "init": nothing, "_lazy_init": nothing, "is_available": lambda: True,
        "is_initialized": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "set_device": nothing,
        "current_stream": lambda *_: stream, "default_stream": lambda *_: stream, "set_stream": nothing,
        "stream": lambda *_: nullcontext(), "synchronize": nothing, "Stream": _Stream, "Event": _Event,
        "empty_cache": nothing, "is_bf16_supported": lambda *_, **__: True, "manual_seed": own.manual_seed,
        "manual_seed_all": own.manual_seed, "get_rng_state": lambda *_: own.get_state(),
        "set_rng_state": lambda state, *_: own.set_state(state), "get_rng_state_all": lambda: [own.get_state()],
        "set_rng_state_all": lambda states: own.set_state(states[0]), "get_device_capability": lambda *_: (9, 0),
        "memory_allocated": lambda *_: 0, "get_device_name": lambda *_: "pretended", "reset_peak_memory_stats": nothing,
        "is_current_stream_capturing": lambda: False, "_is_in_bad_fork": lambda: False,
    }  # fmt: skip


def _accelerator() -> dict[str, Any]:
    return {
        "current_accelerator": lambda *_, **__: CARD, "current_device_index": lambda: 0, "device_count": lambda: 1,
        "is_available": lambda: True, "memory_stats": lambda *_: {}, "synchronize": lambda *_: None,
        "current_stream": lambda *_: _Stream(),
    }  # fmt: skip


_host_autocast = threading.local()


def _autocast() -> dict[str, Any]:
    """Autocast on the card is that of the CPU; the CPU's own is only noted."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

    return {
        "is_autocast_enabled": lambda d="cuda": enabled("cpu") if d == "cuda" else getattr(_host_autocast, "on", False),
        "get_autocast_dtype": lambda d: (
            dtype("cpu") if d == "cuda" else getattr(_host_autocast, "dtype", torch.bfloat16)
        ),
        "set_autocast_enabled": lambda d, on: (
            set_enabled("cpu", on) if d == "cuda" else setattr(_host_autocast, "on", on)
        ),
        "set_autocast_dtype": lambda d, t: set_dtype("cpu", t) if d == "cuda" else setattr(_host_autocast, "dtype", t),
    }


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """In it, this process has a GPU. All threads that start in it check what they compute."""
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def run_checked(self: threading.Thread) -> None:
        with _Check():
            run(self)

    device_context = torch.utils._device.DeviceContext

    def in_context(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in torch.utils._device._device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = self.device
            return _patched_maker(func)(*args, **kwargs) if _is_card(self.device) else func(*args, **kwargs)
        return func(*args, **kwargs)

    def device_of(self: Tensor) -> torch.device:
        real = _REAL_DEVICE(self)
        return CARD if real.type == "cpu" and is_on_card(self) else real

    to, deepcopy = Tensor.to, torch.storage._StorageBase.__deepcopy__
    as_tensor = torch.as_tensor

    def deepcopied(self: Any, memo: Any) -> Any:
        copied = deepcopy(self, memo)
        if hasattr(self, "on_card"):
            copied.on_card = True
        return copied

    def as_moved(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        made = as_tensor(data, dtype=dtype, **({} if device is None or _is_card(device) else {"device": device}))
        return made if device is None else made.to(device)

    torch.utils._device._device_constructors()  # tables of functions, made once: before these are replaced
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Any, *args: Any) -> Any:
        groups = group(lists, *args)
        return {(one[0][0][0].device, dtype): one for (_, dtype), one in groups.items()}

    with ExitStack() as stack:
        new_to = _patched_to(to)
        patches: list[tuple[Any, str, Any]] = [
            (Tensor, "to", new_to), (Tensor, "cpu", lambda self, *_: new_to(self, "cpu")),
            (Tensor, "cuda", lambda self, *_, **__: new_to(self, "cuda")),
            (Tensor, "device", property(device_of)),
            (Tensor, "is_cuda", property(lambda self: self.device.type == "cuda")),
            (Tensor, "is_cpu", property(lambda self: self.device.type == "cpu")),
            (torch.storage._StorageBase, "__deepcopy__", deepcopied), (torch, "as_tensor", as_moved),
            (torch._C, "_group_tensors_by_device_and_dtype", grouped), (torch, "Generator", _Generator),
            (device_context, "__torch_function__", in_context),
            (threading.Thread, "_bootstrap_inner", run_checked),
            *((torch.accelerator, name, value) for name, value in _accelerator().items()),
            *((torch, name, _patched_maker(getattr(torch, name))) for name in _MAKERS),
            *((Tensor, name, _patched_maker(getattr(Tensor, name))) for name in _NEW),
            *((torch.cuda, name, value) for name, value in _cuda().items()),
            *((torch, name, value) for name, value in _autocast().items()),
        ]  # fmt: skip
        for owner, name, value in patches:
            stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(_Check())
        yield
