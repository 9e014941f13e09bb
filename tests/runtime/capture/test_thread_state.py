"""A context around the stack's call raises an error that names what it changes: the blocks would run outside it."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.threads import ThreadState


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def backend_precision() -> Iterator[None]:
    """The newer way to choose it, after which `torch.get_float32_matmul_precision` raises."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "inference_mode": (torch.inference_mode, "inference mode is True, was False"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast is"),
    "sdpa_kernel": (lambda: sdpa_kernel(SDPBackend.MATH), "sdpa kernels is"),
    "default dtype": (default_dtype, "default dtype is torch.float64, was torch.float32"),
    "default device": (lambda: torch.device("meta"), "default device is meta, was cpu"),
    "matmul precision": (matmul_precision, "matmul precision is ('tf32', 'bf16')"),
    "a backend's matmul precision": (backend_precision, "matmul precision is ('tf32', 'ieee')"),
    "deterministic": (deterministic, "deterministic is True"),
}


@pytest.mark.parametrize("kind", CONTEXTS)
def test_the_error_names_what_changed(kind: str) -> None:
    context, named = CONTEXTS[kind]
    before = ThreadState.current()
    with context(), pytest.raises(UnsupportedError, match=re.escape(named)):
        before.check_unchanged()
    before.check_unchanged()


def test_a_pass_without_gradients_is_no_change_but_one_with_gradients_is() -> None:
    before = ThreadState.current()
    with torch.no_grad():
        before.check_unchanged()
        before = ThreadState.current()
    with pytest.raises(UnsupportedError, match="grad mode is True, was False"):
        before.check_unchanged()


@pytest.mark.parametrize("kind", ["inference_mode", "autocast", "default device"])
def test_applied_and_restored(kind: str) -> None:
    context, _ = CONTEXTS[kind]
    with context():
        inside = ThreadState.current()
    before = ThreadState.current()
    with pytest.raises(ZeroDivisionError), inside.applied():
        inside.check_unchanged()
        _ = 1 / 0
    before.check_unchanged()
