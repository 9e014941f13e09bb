"""What a resume needs is the same from a folder and from one file, and no rank's is another's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo.dist_checkpointing.commit import RankPart, SavingRanks, TensorPart
from lightning_hanayo.dist_checkpointing.compare import data_documents
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.errors import CheckpointError, UnsupportedError
from lightning_hanayo.strategy.checkpoints.resume import (
    KEY,
    ResumeState,
    SavedRun,
    gathered,
    saved_run,
    with_resume,
)
from lightning_hanayo.topology import Topology

GRADIENT = torch.arange(12.0).view(4, 3)
TOP, BOTTOM = Region((((0, 1), (2, 3)), ((0, 3),))), Region((((1, 2), (3, 4)), ((0, 3),)))
LOADER = {"order": torch.tensor([2, 0, 1]), "position": 2, "epoch": None}
RUN = {
    "seed": 5,
    "samples": {"batch": 8, "data": 1, "accumulate": 2},
    "layout": {"data": 1, "pipe": 1, "cube": [1, 2, 1], "num_microbatches": 4},
}


def state_of(rank: int) -> ResumeState:
    """Of a cube of two ranks: each has half of a gradient's rows, and rank 0 reads the data."""
    region = (TOP, BOTTOM)[rank]
    rows = GRADIENT[rank::2].clone()
    random = TensorPart.whole(f"random/{rank}/now/torch", torch.full((2,), rank, dtype=torch.uint8), "state")
    gradient = TensorPart("gradient/0/w", rows, (4, 3), region, "optimizer")
    return ResumeState(RUN, {0: {"loaders": [LOADER]}} if rank == 0 else {}, [random, gradient])


def of_folder(folder: Path) -> SavedRun:
    """One process writes the parts of both ranks."""
    both = RankPart()
    for rank in (0, 1):
        both = with_resume(both, state_of(rank))
    tensors = [part for part in both.tensors if part.name != "gradient/0/w"]
    whole = TensorPart("gradient/0/w", GRADIENT, (4, 3), Region.whole((4, 3)), "optimizer")
    Saver(SavingRanks()).save(
        str(folder), RankPart([*tensors, whole], both.texts, {"step": 0, "epoch": 0, "layout": {}})
    )
    opened = CheckpointFolder(folder)
    tensors_in = {name: opened.stored(name) for name in opened.manifest.tensors}
    saved = saved_run({KEY: {"run": dict(state_of(0).document), "data": data_documents(opened), "tensors": tensors_in}})
    assert saved is not None
    return saved


def of_file(path: Path) -> SavedRun:
    """Two ranks' states come to rank 0."""

    def gather(own: Any) -> list[Any]:
        return [own, ({}, state_of(1).tensors)]

    torch.save({KEY: gathered(state_of(0), gather)}, path)
    saved = saved_run(torch.load(path, weights_only=True))
    assert saved is not None
    return saved


@pytest.mark.parametrize("read", [of_folder, of_file])
def test_all_of_it_comes_back(tmp_path: Path, read: Any) -> None:
    saved = read(tmp_path / "saved.ckpt")
    assert saved.samples.total == 16
    assert saved.topology == Topology(cube=(1, 2, 1))
    (loader,) = saved.data_document(0)["loaders"]
    assert loader["order"].tolist() == [2, 0, 1]
    assert loader["position"] == 2 and loader["epoch"] is None
    assert not saved.data_document(1)
    for rank, region in enumerate((TOP, BOTTOM)):
        assert torch.equal(saved.read("gradient/0/w", region), GRADIENT[rank::2])


@pytest.mark.parametrize("read", [of_folder, of_file])
def test_random_states_are_those_of_the_rank_that_read_the_data(tmp_path: Path, read: Any) -> None:
    saved = read(tmp_path / "saved.ckpt")
    assert saved.random_states(0, "now")["torch"].tolist() == [0, 0]
    assert saved.random_states(1, "now") == {}, "no such data rank has saved"


def test_a_checkpoint_of_a_plain_trainer_says_nothing() -> None:
    assert saved_run({"state_dict": {}}) is None


def test_a_loader_state_that_needs_pickle_is_refused_by_name() -> None:
    state = ResumeState(RUN, {0: {"loaders": [{"sampler": object()}]}}, [])
    with pytest.raises(UnsupportedError, match=r"training loaders.*sampler"):
        with_resume(RankPart(), state)


@pytest.mark.parametrize(
    "changed", [{"seed": "5"}, {"samples": {}}, {"samples": 3}, {"layout": {"data": 0}}, {"layout": []}]
)
def test_an_impossible_document_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="What the checkpoint says of its run"):
        saved_run({KEY: {"run": RUN | changed, "data": {}, "tensors": {}}})
