"""The state of torch that a step's thread copies from the main thread, and that user code must not change.

Grad mode, inference mode, autocast and the default device belong to a thread; SDPA flags, matmul flags and the default
dtype belong to the process. The stack's blocks run outside the user's `with` statements, so a state that is different
where the step calls the stack would silently be lost. It is an error; but a pass without gradients is known as such.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.autograd import forward_ad

from lightning_hanayo.errors import UnsupportedError

_DEVICES = ("cpu", "cuda")
_Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""by device: whether it is enabled, and its dtype"""


@dataclass(frozen=True)
class ThreadState:
    """A snapshot. Errors print the field names."""

    grad_mode: bool
    inference_mode: bool
    autocast: _Autocast
    autocast_cache: bool
    sdpa_kernels: tuple[bool, ...]
    matmul_precision: tuple[str, ...]
    default_dtype: torch.dtype
    default_device: str
    deterministic: bool
    torch_func_level: int
    forward_ad_level: int
    stream: Any

    @staticmethod
    def current() -> "ThreadState":
        """The state of the calling thread and of the process."""
        cuda = torch.backends.cuda
        return ThreadState(
            grad_mode=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast=_autocast(),
            autocast_cache=torch.is_autocast_cache_enabled(),
            sdpa_kernels=(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
            matmul_precision=_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            default_device=_default_device(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            torch_func_level=torch._C._functorch.maybe_current_level() or 0,
            forward_ad_level=forward_ad._current_level,
            stream=torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the parts of the state that belong to a thread, in the calling thread."""
        before, cache, device = _autocast(), torch.is_autocast_cache_enabled(), _default_device()
        _set_autocast(self.autocast, self.autocast_cache)
        try:
            with (
                torch.inference_mode(self.inference_mode),
                torch.set_grad_enabled(self.grad_mode),
                # The default device is set only if it differs: once set, it makes every call of torch a little slower.
                nullcontext() if self.default_device == device else torch.device(self.default_device),
            ):
                if self.stream is not None:
                    torch.cuda.set_device(self.stream.device)
                    torch.cuda.set_stream(self.stream)
                yield
        finally:
            _set_autocast(before, cache)

    def check_unchanged(self) -> None:
        """Compare with the calling thread's state now. Grad mode may be off where it was on: a pass without gradients.

        Raises:
            UnsupportedError: the user's code calls the stack inside a context that changes the state.
        """
        now = ThreadState.current()
        if now == self:
            return
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(now, f.name)]
        if self.grad_mode and changed == ["grad_mode"]:
            return
        if changed:
            hint = " For a pass without gradients use torch.no_grad()." if "inference_mode" in changed else ""
            details = ", ".join(f"{n.replace('_', ' ')} is {getattr(now, n)}, was {getattr(self, n)}" for n in changed)
            raise UnsupportedError(
                f"the block stack is called inside a context that changes {details}. Its blocks run on several "
                f"pipeline stages, outside that context. Set it for the whole run (Trainer(precision=...)) or inside "
                f"the block.{hint}"
            )


def _autocast() -> _Autocast:
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)


def _matmul_precision() -> tuple[str, ...]:
    """Of products in float32, on GPUs and on the CPU.

    `torch.get_float32_matmul_precision` raises if one of these, as the newer way, is set without the other way.
    """
    backends = torch.backends
    on_cpu = backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    chosen = (backends.cuda.matmul.fp32_precision, on_cpu)
    return tuple("ieee" if one == "none" else one for one in chosen)  # "none": not chosen yet


def _set_autocast(autocast: _Autocast, cache: bool) -> None:
    for device, enabled, dtype in autocast:
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_cache_enabled(cache)


def _default_device() -> str:
    """The default device. Without a mode it is the CPU; torch takes 13 us to say so, longer than all else here."""
    return "cpu" if torch._C._len_torch_function_stack() == 0 else str(torch.get_default_device())
