"""Small states of two ranks, whose checkpoint says from which step it is."""

import torch

from lightning_hanayo.dist_checkpointing.commit import RankPart, TensorPart
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.region import Region


def part_of(rank: int, step: int, num_ranks: int = 2, size: int = 64) -> RankPart:
    """Rank r has rows 2r and 2r + 1 of "weight" and its momentum, all of them `step`; rank 0 has what all need once."""
    rows = Region((((2 * rank, 2 * rank + 2),), ((0, size),)))
    shape = (2 * num_ranks, size)
    value = torch.full((2, size), float(step))
    tensors = [
        TensorPart("model/weight", value, shape, rows, "model"),
        TensorPart("optimizer/0/weight/exp_avg", value / 2, shape, rows, "optimizer"),
    ]
    if rank > 0:
        return RankPart(tensors, {f"state-data-{rank:05d}": {"rank": rank, "step": step}})
    counter = TensorPart("optimizer/0/weight/step", torch.tensor(float(step)), (), Region.whole(()), "optimizer")
    return RankPart([*tensors, counter], {"state": {"step": step}}, {"step": step, "epoch": 1, "module": "Model"})


def step_of(path: str) -> int:
    """From which step a checkpoint is, once all that is in it was verified and found to be from that step."""
    folder = CheckpointFolder(path)
    folder.verify()
    steps = {float(folder.read(name).max()) for name in ("model/weight", "optimizer/0/weight/step")}
    steps |= {float(folder.read("model/weight").min()), 2 * float(folder.read("optimizer/0/weight/exp_avg").mean())}
    steps |= {float(folder.text(stem)["step"]) for stem in folder.manifest.texts}
    assert steps == {float(folder.manifest.step)}
    return folder.manifest.step
