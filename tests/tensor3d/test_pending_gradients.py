"""Sums of weight gradients that end late, while one or two other actions run."""

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
        starter = self._turns.action

        def finish() -> list[Tensor]:
            self._turns.wait(lambda: None, starter)
            return list(gradients)

        return Pending(None, finish)


def test_sums_of_the_pair_before_end_while_a_forward_has_the_device() -> None:
    turns = DeviceTurns()
    stage, weights = StageWeights(None, turns, keeps_weights=False), [Weight(turns) for _ in range(2)]
    stage.begin_batch()

    def forward() -> None:
        for _ in range(4):
            turns.wait(lambda: None, turns.action)

    def backward() -> None:
        for weight in weights:
            stage.add(weight, [torch.ones(SIZE)], [True])  # type: ignore[arg-type]

    pairs = 3
    for _ in range(pairs):
        turns.run(forward, backward)
    stage.finish_gradients()
    turns.close()
    for weight in weights:
        assert weight.parameters[0].grad is not None
        assert weight.parameters[0].grad.tolist() == [pairs] * SIZE
