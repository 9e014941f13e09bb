"""Actions and their text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Action, Kind
from tests.schedule.samples import unhurried


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F0", Action(0, Kind.F, 0)),
        ("3I2", Action(3, Kind.I, 2)),
        ("2SEND_F0", Action(2, Kind.SEND_F, 0)),
        ("3RECV_F0", Action(3, Kind.RECV_F, 0)),
        ("3SEND_B0", Action(3, Kind.SEND_B, 0)),
        ("12RECV_B10", Action(12, Kind.RECV_B, 10)),
        ("2REDUCE_GRAD", Action(2, Kind.REDUCE_GRAD, None)),
    ],
)
def test_a_cell_names_an_action(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert Action.parse(f" {text} ") == action
    assert str(action) == text


@given(st.integers(0, 99), st.sampled_from(Kind), st.integers(0, 999))
@unhurried
def test_text_and_back(stage: int, kind: Kind, microbatch: int) -> None:
    action = Action(stage, kind, None if kind is Kind.REDUCE_GRAD else microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "0X0", "0f0", "0F", "0F-1", "1UNSHARD", "2REDUCE_GRAD0", "0F0 0F1", "(0F0;1B0)"]
)
def test_text_that_is_no_action_is_rejected(text: str) -> None:
    with pytest.raises(HanayoError, match="is no action: expected <stage><kind><micro-batch>"):
        Action.parse(text)


def test_compute_and_messages_are_distinct() -> None:
    assert [kind for kind in Kind if kind.is_compute] == [Kind.F, Kind.B, Kind.I, Kind.W]
    assert [kind for kind in Kind if kind.is_message] == [Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B]


def test_an_action_is_a_small_value() -> None:
    assert not hasattr(Action(0, Kind.F, 0), "__dict__")
    with pytest.raises(AttributeError):
        Action(0, Kind.F, 0).stage = 1  # type: ignore[misc]
