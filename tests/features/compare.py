"""Merges the records of all ranks of a trial, and says how they differ from those of another one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.features.trial import Records
from tests.harness.training import Layout, assert_bit_equal, merge_owned

OF_ALL_RANKS = ("global step", "epoch", "callback metrics", "results")


def merged(ranks: list[Records], layout: Layout) -> Records:
    """One record of all ranks: whole weights, mean losses, the samples of all data ranks in order.

    Asserts that the ranks agree on weights, steps, callback metrics and the results of evaluations.
    """
    pipelines = [[ranks[rank] for rank in group] for group in layout.topology.groups("pipe")]
    if layout.topology.cube != (1, 1, 1):
        pipelines = [[ranks[0]]]  # own_weights gathers from the cube
    weights = [merge_owned([rank.weights for rank in pipeline]) for pipeline in pipelines]
    for other in weights[1:]:
        assert_bit_equal(other, weights[0])
    for pipeline in pipelines:
        for rank in pipeline[1:]:
            for name in OF_ALL_RANKS:
                found = list(differences(rank.values.get(name), pipeline[0].values.get(name), 0.0, name))
                assert not found, f"ranks of a pipeline differ: {found}"
    firsts = [pipeline[0] for pipeline in pipelines]
    losses = [sum(of_batch) / len(of_batch) for of_batch in zip(*(rank.losses for rank in firsts), strict=True)]
    parts = {name: [_interleaved([rank.parts[name] for rank in firsts])] for name in firsts[0].parts}
    return Records(dict(sorted(weights[0].items())), losses, firsts[0].values, parts)


def differing(actual: Records, expected: Records, bound: float) -> dict[str, list[str]]:
    """By record, what differs by more than `bound`, relative to the largest number of a tensor."""
    pairs = {
        "weights": (actual.weights, expected.weights),
        "losses": (actual.losses, expected.losses),
        "samples": (actual.parts, expected.parts),
    }
    names = sorted(actual.values.keys() | expected.values.keys())
    pairs |= {name: (actual.values.get(name), expected.values.get(name)) for name in names}
    found = {name: list(differences(*pair, bound, name)) for name, pair in pairs.items()}
    return {name: lines for name, lines in found.items() if lines}


def differences(actual: Any, expected: Any, bound: float, path: str) -> Iterator[str]:
    """Each place where the two differ, with both values."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            yield f"{path}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        elif not _is_near(actual, expected, bound):
            yield f"{path}: differs by up to {(actual.double() - expected.double()).abs().max().item():.3g}"
    elif isinstance(expected, float) and isinstance(actual, float):
        if not _is_near(torch.tensor(actual), torch.tensor(expected), bound):
            yield f"{path}: {actual!r}, expected {expected!r}"
    elif isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if list(actual) != list(expected):
            changed = sorted(set(actual) ^ set(expected), key=str) or "another order"
            yield f"{path}: {len(actual)} names, expected {len(expected)}; different: {changed}"
        for name in actual.keys() & expected.keys():
            yield from differences(actual[name], expected[name], bound, f"{path}[{name!r}]")
    elif _is_sequence(expected) and _is_sequence(actual):
        if len(actual) != len(expected):
            yield f"{path}: {len(actual)} values, expected {len(expected)}: {actual!r:.300}, expected {expected!r:.300}"
        for index, (one, other) in enumerate(zip(actual, expected, strict=False)):
            yield from differences(one, other, bound, f"{path}[{index}]")
    elif actual != expected:
        yield f"{path}: {actual!r:.300}, expected {expected!r:.300}"


def _is_near(actual: Tensor, expected: Tensor, bound: float) -> bool:
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    scale = max(1.0, expected.double().abs().max().item()) if expected.numel() else 1.0
    return torch.allclose(actual.double(), expected.double(), rtol=0.0, atol=bound * scale, equal_nan=True)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _interleaved(parts: list[list[Tensor]]) -> Tensor:
    """The samples of all data ranks in the order of the loader."""
    columns = [torch.cat(part) for part in parts]
    return torch.stack(columns, dim=1).flatten(0, 1)
