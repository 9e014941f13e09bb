"""Each parameter lies on one rank; the others hold a placeholder in its place.

stage    0     1     2     3
rank     0     1     1     0         embedding and head: rank 0
blocks   0 1   2     3     4 5
"""

import pytest
import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.ownership import Ownership, leave_out
from lightning_hanayo.partition.stack import find_stack

STAGES = (range(2), range(2, 3), range(3, 4), range(4, 6))
RANKS = (0, 1, 1, 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(6))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(3))


def ownership(model: nn.Module) -> Ownership:
    return Ownership(find_stack(model), STAGES, RANKS)


def test_who_owns_what() -> None:
    model = Model()
    ranks = ownership(model).rank_of_names(model)
    assert ranks.keys() == model.state_dict().keys()
    owners = {name.rsplit(".", 2)[0] if name.startswith("blocks") else name: rank for name, rank in ranks.items()}
    assert owners == {
        "positions": 0, "embedding.weight": 0, "head.weight": 0,
        "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "blocks.4": 0, "blocks.5": 0,
    }  # fmt: skip


def test_names_that_begin_alike_are_told_apart() -> None:
    model = nn.Module()
    model.h = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))
    owner = Ownership(find_stack(model), (range(1), range(1, 12)), (0, 1))
    assert [owner.rank_of_names(model)[f"h.{i}.bias"] for i in range(12)] == [0] + [1] * 11


def test_stages_share_out_all_parameters() -> None:
    model = Model()
    owner = ownership(model)
    stages = [owner.stage_parameters(model, stage) for stage in range(4)]
    assert [len(stage) for stage in stages] == [1 + 8, 4, 4, 8]
    assert {p for stage in stages for p in stage} == set(model.parameters())


def test_parameters_of_several_stages() -> None:
    model = Model()
    model.blocks[1][0].weight = model.blocks[0][0].weight  # one stage: its own affair
    model.blocks[4][0].weight = model.blocks[0][0].weight  # stages 0 and 3
    model.blocks[5][1].bias = model.embedding.weight  # a block and the code outside
    found = ownership(model).parameters_of_several(model)
    assert found == {model.blocks[0][0].weight, model.embedding.weight}


def test_placeholders_look_like_what_they_stand_for() -> None:
    model = Model()
    model.blocks[2][0].weight.requires_grad_(False)
    model.blocks[2][0].bias.mark = "no decay"
    before = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
    gone = {model.embedding.weight, *model.blocks[2].parameters()}
    leave_out(model, {p for p in model.parameters() if p not in gone}, elsewhere=model.blocks[2].modules())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in after.items()} == before
    assert [name for name, p in after.items() if p.is_meta] == [
        "embedding.weight", "blocks.2.0.weight", "blocks.2.0.bias", "blocks.2.1.weight", "blocks.2.1.bias",
        "head.weight",
    ]  # fmt: skip
    assert model.head.weight is model.embedding.weight and model.blocks[2][0].bias.mark == "no decay"
    assert model.blocks[2][1].running_mean.is_meta and not model.positions.is_meta


def test_what_is_kept_stays_the_same_object() -> None:
    model = Model()
    keep = set(model.blocks[0].parameters())
    leave_out(model, keep)
    assert {p for p in model.parameters() if not p.is_meta} == keep


@pytest.mark.parametrize(("where", "other", "refused"), [(2, 0, True), (3, 2, False), (5, 0, False), (4, 3, True)])
def test_blocks_may_share_within_a_rank(where: int, other: int, refused: bool) -> None:
    model = Model()
    model.blocks[where][0].bias = model.blocks[other][0].bias
    if not refused:
        ownership(model).check(model)
        return
    first, second = sorted((where, other))
    named = rf"blocks\.{first}\.0\.bias and blocks\.{second}\.0\.bias are one parameter, but lie on pipeline ranks"
    with pytest.raises(UnsupportedError, match=named):
        ownership(model).check(model)


def test_a_block_on_another_rank_cant_share_with_the_outside() -> None:
    model = Model()
    model.outside = nn.Linear(4, 4)
    model.outside.weight = model.blocks[2][0].weight
    with pytest.raises(UnsupportedError, match=r"blocks\.2\.0\.weight and outside\.weight are one parameter"):
        ownership(model).check(model)
