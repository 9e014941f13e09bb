"""One stack of a model is cut; the others stay whole on pipeline rank 0, and set-up says what that costs.

encoder   2 blocks   180 parameters   whole on rank 0    40 %
decoder   3 blocks   270 parameters   cut
"""

import pytest
from torch import nn

from lightning_hanayo.partition.stack import describe_uncut, find_stack, uncut_stacks
from tests.harness.pretrained_models import BART, MODELS, trained


def linears(count: int, width: int = 9) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


def model(**stacks: nn.Module) -> nn.Module:
    return nn.ModuleDict(stacks)


def test_other_stacks_are_found_with_their_share() -> None:
    two = model(encoder=linears(2), decoder=linears(3))
    ((uncut, share),) = uncut_stacks(two, find_stack(two)).items()
    assert (uncut.name, share) == ("encoder", pytest.approx(0.4))


def test_the_largest_of_several_comes_first_and_small_ones_are_left_out() -> None:
    several = model(head=linears(2, 2), a=linears(2), b=linears(3), c=linears(4))
    assert [one.name for one in uncut_stacks(several, find_stack(several))] == ["b", "a"]


def test_a_row_inside_a_block_of_another_stack_is_no_stack_of_its_own() -> None:
    rows = nn.ModuleList(nn.Sequential(*linears(3), nn.ReLU()) for _ in range(2))
    nested = model(encoder=rows, decoder=linears(9))
    assert [one.name for one in uncut_stacks(nested, find_stack(nested))] == ["encoder"]


def test_nothing_is_said_of_a_model_with_one_stack() -> None:
    one = model(layers=linears(4), head=nn.Linear(9, 9))
    assert describe_uncut(one, find_stack(one)) == ""


def test_the_text_names_both_stacks_the_cost_and_the_way_out() -> None:
    two = model(encoder=linears(2), decoder=linears(3))
    assert describe_uncut(two, find_stack(two)) == (
        "ModuleDict has 2 stacks of blocks, of which one is cut: decoder (3 blocks: Linear). Whole on pipeline rank 0: "
        "encoder (40% of the parameters in blocks). HanayoStrategy(blocks='encoder') cuts that stack instead."
    )


def test_lists_of_one_length_in_one_module_may_be_called_in_turn() -> None:
    """As the attentions and feed-forwards of SasRec; an encoder and a decoder are in modules of their own."""
    one = model(net=model(attentions=linears(3), forwards=linears(3)), other=model(layers=linears(3)))
    text = describe_uncut(one, find_stack(one, "net.attentions"))
    assert "If a loop calls them in turn, blocks=['net.attentions', 'net.forwards'], in the order of its" in text


@pytest.mark.parametrize(
    ("name", "cut", "whole"),
    [
        ("T5ForConditionalGeneration", "decoder.block", "encoder.block"),
        ("BartForConditionalGeneration", "model.decoder.layers", "model.encoder.layers"),
        ("WhisperForConditionalGeneration", "model.decoder.layers", "model.encoder.layers"),
    ],
)
def test_encoders_and_decoders_of_transformers_are_two_stacks(name: str, cut: str, whole: str) -> None:
    known = trained(name, MODELS.get(name, BART))
    for stack, other in ((cut, whole), (whole, cut)):
        assert [one.name for one in uncut_stacks(known, find_stack(known, stack))] == [other]
    assert find_stack(known).name == cut
