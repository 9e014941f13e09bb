"""What autograd's graph shows of a loss.

cross_entropy + 0.1 * error.sum() / mask.sum()     a mean over 5, and a sum that is divided by 3
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.pipeline_parallel.autograd.loss_graph import LossGraph, LossTerm, in_host_memory, read_loss

LABELS = torch.tensor([0, 1, -100, 2, 3, 4])
WEIGHT = nn.Parameter(torch.randn(5, 5))
SCALE = nn.Parameter(torch.zeros(()))
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])


def graph_of(loss: Callable[[Tensor], Tensor], *, has_boundary: bool = True) -> LossGraph:
    """Of a loss of scores [6, 5], which a stack of blocks has made."""
    output = nn.Linear(5, 5)(torch.randn(6, 5))
    stop = {output.grad_fn} if has_boundary and output.grad_fn is not None else set()
    return read_loss(loss(output * 1.0), stop, 6, couplings=True)


def shown(term: LossTerm) -> tuple[str, str, float]:
    return term.function, term.kind, round(float(term.count), 6)


def error(scores: Tensor) -> Tensor:
    return (scores - 1.0).square()


TERMS: dict[str, tuple[Callable[[Tensor], Tensor], list[tuple[str, str, float]]]] = {
    "labels that aren't ignored": (lambda x: functional.cross_entropy(x, LABELS), [("cross_entropy", "mean", 5)]),
    "class weights": (
        lambda x: functional.cross_entropy(x, LABELS, weight=CLASS_WEIGHTS),
        [("cross_entropy", "mean", 31)],
    ),
    "a sum": (lambda x: functional.cross_entropy(x, LABELS, reduction="sum"), [("cross_entropy", "sum", 1)]),
    "smoothed labels": (
        lambda x: functional.cross_entropy(x, LABELS, label_smoothing=0.1),
        [("cross_entropy", "mean", 5), ("sum", "sum", 5)],
    ),
    "a mean by hand": (lambda x: error(x).sum() / torch.tensor(3.0), [("sum", "sum", 3)]),
    "a mean by a factor": (lambda x: error(x).sum() * 0.5, [("sum", "sum", 2)]),
    "all elements": (lambda x: functional.mse_loss(x, torch.zeros(6, 5)), [("mse_loss", "mean", 30)]),
    "a loss for each task": (
        lambda x: torch.stack([functional.cross_entropy(x, LABELS), x.mean()]).mean(),
        [("cross_entropy", "mean", 5), ("mean", "mean", 30)],
    ),
    "weighed tasks": (
        lambda x: (torch.exp(-SCALE) * torch.stack([functional.cross_entropy(x, LABELS), x.mean()]) + SCALE).sum(),
        [("cross_entropy", "mean", 5), ("mean", "mean", 30), ("a penalty", "constant", 1)],
    ),
    "a mean for each class": (lambda x: (2 * x.mean(0)).sum(), [("mean", "mean", 30)]),
    "a penalty": (
        lambda x: functional.cross_entropy(x, LABELS) + 0.1 * WEIGHT.square().sum(),
        [("cross_entropy", "mean", 5), ("a penalty", "constant", 1)],
    ),
    "a learned weight": (
        lambda x: torch.exp(-SCALE) * functional.cross_entropy(x, LABELS) + SCALE,
        [("cross_entropy", "mean", 5), ("a penalty", "constant", 1)],
    ),
}


@pytest.mark.parametrize("has_boundary", [True, False])
@pytest.mark.parametrize("name", TERMS)
def test_terms(name: str, has_boundary: bool) -> None:
    loss, expected = TERMS[name]
    graph = graph_of(loss, has_boundary=has_boundary)
    assert ([shown(term) for term in graph.terms], graph.couplings) == (expected, ())


COUPLINGS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "the root of a mean": (lambda x: functional.mse_loss(x, torch.zeros(6, 5)).sqrt(), "sqrt of a mean or sum"),
    "a norm": (lambda x: x.norm(), "linalg_vector_norm of a mean or sum"),
    "Dice": (lambda x: 1 - x.sum() / (x.exp().sum() + 3), "a quotient of means"),
    "a curve of a mean for each class": (lambda x: x.mean(0).square().sum(), "pow of a mean"),
    "Dice of each class": (lambda x: (1 - x.sum(0) / (x.exp().sum(0) + 3)).mean(), "a quotient of means"),
}
PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "in-batch negatives": lambda x: functional.cross_entropy(x @ x.T, torch.arange(6)),
    "the same by einsum": lambda x: torch.einsum("id,jd->ij", x, x).logsumexp(1).mean(),
    "distances": lambda x: torch.cdist(x, x).mean(),
}


@pytest.mark.parametrize("has_boundary", [True, False])
@pytest.mark.parametrize("name", COUPLINGS)
def test_couplings(name: str, has_boundary: bool) -> None:
    loss, expected = COUPLINGS[name]
    (found,) = graph_of(loss, has_boundary=has_boundary).couplings
    assert found.startswith(expected)


@pytest.mark.parametrize("has_boundary", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_products_of_samples_show_both_factors(name: str, has_boundary: bool) -> None:
    (pair,), (other,) = (graph_of(PAIRS[name], has_boundary=has_boundary).pairs for _ in range(2))
    assert all(one != two for one, two in zip(pair, other, strict=True))


def test_layers_do_not_couple_samples() -> None:
    x = nn.Linear(5, 5)(torch.randn(6, 3, 5))
    attention = nn.MultiheadAttention(5, 1, batch_first=True)
    loss = (attention(x, x, x)[0] @ WEIGHT @ (WEIGHT @ WEIGHT)).mean()
    assert read_loss(loss, {x.grad_fn} if x.grad_fn is not None else (), 6, couplings=True).pairs == ()


def test_a_loss_without_a_graph_shows_nothing() -> None:
    assert read_loss(torch.zeros(()), (), 6, couplings=True) == LossGraph(())


def test_counts_are_copied_once_from_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a mean over labels on a GPU, plus 0.1 times a sum: 0.1 is in host memory."""
    copies = []

    def tolist(tensor: Tensor) -> list[float]:
        copies.append(tensor.device.type)
        return [5.0] * len(tensor) if tensor.is_meta else [float(one) for one in tensor]

    monkeypatch.setattr(Tensor, "tolist", tolist)
    on_device = LossTerm("cross_entropy", "mean", torch.empty((), dtype=torch.int64, device="meta"))
    graph = LossGraph((on_device, LossTerm("sum", "sum", torch.tensor([10.0])), LossTerm("sum", "sum", 1.0)))
    assert [[term.count for term in one.terms] for one in in_host_memory([graph, graph])] == [[5.0, 10.0, 1.0]] * 2
    assert copies == ["meta", "cpu"]
