"""Each parameter belongs to one pipeline rank.

stage    0     1     2     3
rank     0     1     1     0         embedding and head: rank 0
blocks   0 1   2     3     4 5
"""

import weakref

import pytest
import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.ownership import Ownership, replace_with_placeholders
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


def test_rank_of_each_state_dict_entry() -> None:
    model = Model()
    ranks = ownership(model).rank_by_name(model)
    assert ranks.keys() == model.state_dict().keys()
    owners = {name.rsplit(".", 2)[0] if name.startswith("blocks") else name: rank for name, rank in ranks.items()}
    assert owners == {
        "positions": 0, "embedding.weight": 0, "head.weight": 0,
        "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "blocks.4": 0, "blocks.5": 0,
    }  # fmt: skip


def test_entries_under_other_names_belong_to_the_rank_of_their_tensor() -> None:
    model, names = Model(), Model().state_dict().keys()
    expected = ownership(model).rank_by_name(model)
    replace_with_placeholders(model, set(model.head.parameters()))
    model.register_state_dict_post_hook(rename)
    found = ownership(model).rank_by_name(model)
    assert {name: found[f"net.{name}"] for name in names} == {name: found[name] for name in names} == expected


def rename(_: nn.Module, state: dict[str, torch.Tensor], *__: object) -> None:
    for name in list(state):
        state[f"net.{name}"] = state.pop(name)


def test_block_1_is_not_confused_with_block_11() -> None:
    model = nn.Module()
    model.h = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))
    owner = Ownership(find_stack(model), (range(1), range(1, 12)), (0, 1))
    assert [owner.rank_by_name(model)[f"h.{i}.bias"] for i in range(12)] == [0] + [1] * 11


def test_every_parameter_belongs_to_one_stage() -> None:
    model = Model()
    owner = ownership(model)
    stages = list(owner.stage_parameters(model, range(4)).values())
    assert [len(stage) for stage in stages] == [1 + 8, 4, 4, 8]
    assert {p for stage in stages for p in stage} == set(model.parameters())


def test_tied_parameters_are_those_of_two_stages_or_a_block_and_the_outside() -> None:
    model = Model()
    model.blocks[1][0].weight = model.blocks[0][0].weight  # within stage 0
    model.blocks[4][0].weight = model.blocks[0][0].weight  # stages 0 and 3
    model.blocks[5][1].bias = model.embedding.weight  # a block and the code outside
    found = ownership(model).tied_parameters(model)
    assert found == {model.blocks[0][0].weight, model.embedding.weight}


@pytest.mark.parametrize(
    ("blocks", "shares", "rank"), [((0, 2), True, 0), ((2, 3), False, 1), ((0, 5), False, 0), ((3, 4), True, 0)]
)
def test_a_parameter_that_blocks_on_two_ranks_share_belongs_to_rank_0(
    blocks: tuple[int, int], shares: bool, rank: int
) -> None:
    model = Model()
    first, second = (model.blocks[index][0] for index in blocks)
    weight = second.bias = first.bias
    owner = ownership(model)
    assert [id(one) for one in owner.shared_parameters(model)] == [id(weight)] * shares
    ranks = owner.rank_by_name(model)
    assert [ranks[f"blocks.{index}.0.bias"] for index in blocks] == [rank, rank]
    if shares:
        assert any(one is weight for one in owner.stage_parameters(model, [0])[0])
        with pytest.raises(UnsupportedError, match="blocks on several pipeline ranks.*cube=1"):
            owner.check_cube(model)


def test_a_block_on_rank_1_shares_with_code_outside_the_stack() -> None:
    model = Model()
    model.outside = nn.Linear(4, 4)
    model.outside.weight = model.blocks[2][0].weight
    (found,) = ownership(model).shared_parameters(model)
    assert found is model.outside.weight


def test_a_block_on_rank_1_cannot_keep_a_parameter_of_rank_0() -> None:
    model = Model()
    kept = ((model.head.weight, 2, "blocks[2].given.0"),)
    Ownership(find_stack(model), STAGES, (0, 0, 0, 0), kept).check(model)
    with pytest.raises(
        UnsupportedError, match=r"blocks\[2\].given.0 is embedding.weight, which belongs to pipeline rank 0"
    ):
        Ownership(find_stack(model), STAGES, RANKS, kept).check(model)


def test_a_kept_parameter_is_complete_after_the_backward_of_the_lowest_stage_that_uses_it() -> None:
    model = Model()
    weight = model.blocks[4][0].weight
    found = Ownership(find_stack(model), STAGES, RANKS, ((weight, 1, "blocks[1].next"),))
    assert any(one is weight for one in found.stage_parameters(model, [0])[0])
    assert not any(one is weight for one in found.stage_parameters(model, [3])[3])


def test_a_cube_uses_no_parameter_of_another_block() -> None:
    model = Model()
    Ownership(find_stack(model), STAGES, RANKS, ((model.head.weight, 0, "blocks[0].given"),)).check_cube(model)
    other = Ownership(find_stack(model), STAGES, RANKS, ((model.blocks[1][0].weight, 0, "blocks[0].next"),))
    with pytest.raises(UnsupportedError, match=r"blocks\[0\].next is blocks.1.0.weight of another block"):
        other.check_cube(model)


def test_placeholders_have_shape_dtype_ties_and_attributes_of_the_originals() -> None:
    model = Model()
    model.blocks[2][0].weight.requires_grad_(False)
    model.blocks[2][0].bias.mark = "no decay"
    before = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
    replaced = {model.embedding.weight, *model.blocks[2].parameters()}
    lists = [weakref.ref(model.embedding.weight), {"bias": model.blocks[2][0].bias}]
    replace_with_placeholders(
        model, {p for p in model.parameters() if p not in replaced}, buffers_of=model.blocks[2].modules()
    )
    after = dict(model.named_parameters(remove_duplicate=False))
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in after.items()} == before
    assert [name for name, p in after.items() if p.is_meta] == [
        "embedding.weight", "blocks.2.0.weight", "blocks.2.0.bias", "blocks.2.1.weight", "blocks.2.1.bias",
        "head.weight",
    ]  # fmt: skip
    assert model.head.weight is model.embedding.weight and model.blocks[2][0].bias.mark == "no decay"
    assert lists[0]() is model.head.weight and lists[1]["bias"] is model.blocks[2][0].bias  # type: ignore[operator,index]
    assert model.blocks[2][1].running_mean.is_meta and not model.positions.is_meta


def test_kept_parameters_stay_the_same_objects() -> None:
    model = Model()
    keep = set(model.blocks[0].parameters())
    replace_with_placeholders(model, keep)
    assert {p for p in model.parameters() if not p.is_meta} == keep
