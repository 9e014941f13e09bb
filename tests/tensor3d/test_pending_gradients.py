"""Sums of weight gradients that end late, while one or two other actions run."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.overlap.turns import DeviceTurns
from lightning_hanayo.tensor_parallel.mesh import Pending
from lightning_hanayo.tensor_parallel.weights import StageWeights

SIZE = 3


class Weight:
    """Gives the device away while its gradients are summed."""

    is_gathered = True

    def __init__(self, turns: DeviceTurns) -> None:
        self.parameters = [nn.Parameter(torch.zeros(SIZE))]
        self._turns = turns

    def start_reduce_scatter(self, gradients: list[Tensor]) -> Pending[list[Tensor]]:
        def finish() -> list[Tensor]:
            self._turns.wait(lambda: True, lambda: None)
            return list(gradients)

        return Pending(None, finish)


def test_two_backwards_at_once_finish_those_of_the_pair_before() -> None:
    turns = DeviceTurns()
    stage, weights = StageWeights(None, turns, keeps_weights=False), [Weight(turns) for _ in range(2)]
    stage.begin_batch()

    def backward(slot: int) -> None:
        weight: Any = weights[slot]
        stage.add(weight, [torch.ones(SIZE)], [True])

    pairs = 3
    for _ in range(pairs):
        turns.run(lambda: backward(0), lambda: backward(1))
    stage.finish_gradients()
    turns.close()
    for weight in weights:
        assert weight.parameters[0].grad is not None
        assert weight.parameters[0].grad.tolist() == [pairs] * SIZE
