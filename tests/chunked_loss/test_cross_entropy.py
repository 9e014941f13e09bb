"""Chunked cross entropy and its gradients are those of F.cross_entropy, without whole logits."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_hanayo import chunked_cross_entropy
from lightning_hanayo.errors import HanayoError
from tests.harness.live_bytes import Live

WIDTH, VOCABULARY = 6, 11


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((3, 5, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    labels = torch.randint(VOCABULARY, (3, 5), generator=generator)
    labels[1, 2:] = -100
    return hidden, weight, bias, labels


def whole(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    loss = functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2),
                                    labels.flatten(), **options)  # fmt: skip
    return loss.view(labels.shape) if loss.dim() else loss


@pytest.mark.parametrize(
    ("chunk", "reduction", "smoothing", "has_bias"),
    list(product((1, 4, 15, 100), ("mean", "sum", "none"), (0.0, 0.2), (False, True))),
)
def test_exact_in_double_precision(chunk: int, reduction: Any, smoothing: float, has_bias: bool) -> None:
    results = []
    for function in (partial(chunked_cross_entropy, chunk=chunk), whole):
        hidden, weight, bias, labels = operands()
        options = {"reduction": reduction, "label_smoothing": smoothing}
        loss = function(hidden, weight, labels, bias if has_bias else None, **options)
        (loss * torch.arange(1.0, loss.numel() + 1).double().view(loss.shape)).sum().backward()
        results.append((loss.detach(), hidden.grad, weight.grad, bias.grad if has_bias else torch.zeros(())))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_in_bf16_the_sums_are_in_fp32() -> None:
    ours, expected = [], []
    for function, into in ((partial(chunked_cross_entropy, chunk=4), ours), (whole, expected)):
        hidden, weight, _, labels = operands(torch.bfloat16)
        loss = function(hidden, weight, labels, None)
        loss.backward()
        into += [loss.detach(), hidden.grad, weight.grad]
    assert [value.dtype for value in ours] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)


def test_under_autocast_products_are_in_bf16() -> None:
    hidden, weight, _, labels = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, expected = chunked_cross_entropy(hidden, weight, labels), whole(hidden, weight, labels, None)
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours, expected)
    ours.backward()
    assert hidden.grad is not None and hidden.grad.dtype is torch.float32


def test_what_is_frozen_gets_no_gradient() -> None:
    hidden, weight, _, labels = operands()
    weight.requires_grad_(False)
    chunked_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad is None and hidden.grad is not None


def test_without_labels_it_is_nan_as_in_torch() -> None:
    hidden, weight, _, labels = operands()
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    assert loss.isnan()


def test_no_more_than_a_chunk_of_logits_exists() -> None:
    """4096 tokens and 2048 entries: 32 MB of logits, of which F.cross_entropy makes several."""
    peaks = []
    for function in (partial(chunked_cross_entropy, chunk=128), whole):
        hidden = torch.randn(4096, 16, requires_grad=True)
        weight, labels = torch.randn(2048, 16, requires_grad=True), torch.randint(2048, (4096,))
        with Live([hidden, weight, labels]) as live:
            function(hidden, weight, labels, None).backward()
        peaks.append(live.peak)
    assert peaks[0] < 4 * 2**20 and peaks[1] > 64 * 2**20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk=0: expected a whole number"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
        ({"reduction": "max"}, "reduction='max'"),
        ({"labels": torch.zeros(4, dtype=torch.long)}, r"labels \[4\]: expected"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    hidden, weight, _, labels = operands()
    with pytest.raises(HanayoError, match=message):
        chunked_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels} | change)
