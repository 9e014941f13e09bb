"""All ranks start with rank 0's values, whatever their types and strides."""

import torch
import torch.distributed as dist

from lightning_hanayo.strategy.groups import broadcast_values
from tests.harness.pool import Pool


def agreed() -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensors = [
        torch.full((2, 3), float(rank)), torch.full((2, 3), float(rank)).t(), torch.tensor(rank),
        torch.tensor([rank == 0]), torch.full((2,), rank, dtype=torch.bfloat16),
        torch.full((2,), rank, dtype=torch.int16), torch.full((2,), complex(rank, 1)), torch.empty(0),
        torch.full((2, 4), float(rank))[:, ::2],
        torch.nn.Parameter(torch.full((2,), float(rank))),
    ]  # fmt: skip
    broadcast_values(tensors, torch.device("cpu"))
    return [tensor.detach() for tensor in tensors]


def test_agreed(pool: Pool) -> None:
    first, second = pool.run(2, agreed)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs), ours
        assert ours.numel() == 0 or ours.flatten()[0] in (0, 1j, True)
