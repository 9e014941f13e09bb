"""Measures how much slower matrix products run while a number of thread blocks spin on the GPU.

A receive that waits for its sender spins on as many thread blocks (CTAs) as its communicator has channels. Each takes
an SM from the products that run meanwhile; `max_ctas` limits how many there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from recipes.benchmarks.gpu.card import Card
from recipes.benchmarks.gpu.steps import Say
from recipes.benchmarks.harness import Summary

BLOCKS = 0, 4, 16, 32
ROUNDS, PRODUCTS = 7, 10
SECONDS = 0.05
"""for which the blocks spin; the products must have ended before"""


@dataclass(frozen=True)
class ProductFigures:
    """Products [rows, inner] x [inner, columns] while `num_blocks` thread blocks spin; seconds per product."""

    shape: tuple[int, int, int]
    num_blocks: int
    time: Summary
    teraflops: float
    of_alone: float
    """speed compared with that of the products alone"""
    overlapped: bool
    """whether the blocks still spun when the products had ended"""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "ProductFigures":
        """From JSON."""
        return ProductFigures(**{**plain, "shape": tuple(plain["shape"]), "time": Summary(**plain["time"])})


def measure(shape: tuple[int, int, int], card: Card, say: Say) -> list[ProductFigures]:
    """Time products next to each number of spinning blocks, in turn. `shape`: rows, inner, columns."""
    rows, inner, columns = shape
    with card.device:
        left, right = (torch.randn(*size, dtype=torch.bfloat16) for size in ((rows, inner), (inner, columns)))
        out = torch.empty(rows, columns, dtype=torch.bfloat16)

    def run() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)

    times: dict[int, list[float]] = {blocks: [] for blocks in BLOCKS}
    overlapped = dict.fromkeys(BLOCKS, True)
    for turn in range(-1, ROUNDS):
        for blocks in BLOCKS:
            with card.spinning(blocks, SECONDS) as still_spins:
                seconds = card.seconds_of(run) / PRODUCTS
                if turn >= 0:
                    times[blocks].append(seconds)
                    overlapped[blocks] &= still_spins()
    found = [_figures(shape, blocks, times, overlapped[blocks]) for blocks in BLOCKS]
    for one in found:
        say(f"products {rows} x {inner} x {columns}, {one.num_blocks} spinning blocks: {one.teraflops:.1f} TFLOP/s, "
            f"{one.of_alone:.3f} of alone")  # fmt: skip
    return found


def _figures(
    shape: tuple[int, int, int], blocks: int, times: Mapping[int, Sequence[float]], overlapped: bool
) -> ProductFigures:
    time, alone = Summary.of(times[blocks]), Summary.of(times[0])
    teraflops = 2 * shape[0] * shape[1] * shape[2] / time.median / 1e12
    return ProductFigures(shape, blocks, time, teraflops, alone.median / time.median, overlapped)
