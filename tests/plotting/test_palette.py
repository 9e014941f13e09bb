"""The colours of kinds and legs can be told apart, with any kind of colour blindness."""

from itertools import combinations

import pytest

from lightning_hanayo.plotting.palette import (
    DARK,
    IDLE_COLOUR,
    KIND_COLOURS,
    LIGHT,
    LOSS_COLOUR,
    REDUCE_COLOUR,
    action_colour,
    legend_label,
    text_colour,
    wave_legs,
)
from lightning_hanayo.schedule import Action, build, simulate, with_loss_stage

VISION = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
"""how linear red, green and blue are seen (Machado, Oliveira, Fernandes 2009, severity 1)"""
ALL = {
    **{f"{kind}{leg}": shade for kind, pair in KIND_COLOURS.items() for leg, shade in enumerate(pair)},
    "idle": IDLE_COLOUR,
}


def linear(shade: str) -> list[float]:
    parts = [int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(shade: str, vision: str) -> tuple[float, float, float]:
    """CIE L*a*b*, in which a distance of about 2 can just be seen."""
    mixed = [sum(k * part for k, part in zip(row, linear(shade), strict=True)) for row in VISION[vision]]
    r, g, b = (min(1.0, max(0.0, part)) for part in mixed)
    x, y, z = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("vision", VISION)
def test_any_two_colours_can_be_told_apart(vision: str) -> None:
    for (one, first), (other, second) in combinations(ALL.items(), 2):
        distance = sum((a - b) ** 2 for a, b in zip(lab(first, vision), lab(second, vision), strict=True)) ** 0.5
        assert distance > 14, f"{one} and {other}, with {vision} vision"


@pytest.mark.parametrize("shade", [*ALL.values(), LOSS_COLOUR, REDUCE_COLOUR])
def test_numbers_can_be_read_on_their_boxes(shade: str) -> None:
    def luminance(text: str) -> float:
        r, g, b = linear(text)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    bright, dark = sorted((luminance(text_colour(shade)), luminance(shade)), reverse=True)
    assert text_colour(shade) in (DARK, LIGHT)
    assert (bright + 0.05) / (dark + 0.05) > 4, "the contrast ratio of the accessibility guidelines"


def test_legs_of_a_wave_alternate() -> None:
    legs = wave_legs(simulate(build("hanayo", num_ranks=2, num_microbatches=1, num_waves=2)))
    assert legs == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}
    assert [action_colour(Action.parse(f"{stage}F0"), legs) for stage in (0, 3, 4, 7)] == [*ALL.values()][:2] * 2
    assert legend_label(Action.parse("6B0"), legs, 4) == "backward, legs 1, 3"


def test_a_stage_with_only_head_and_loss_has_no_leg() -> None:
    legs = wave_legs(simulate(with_loss_stage(build("1f1b", num_ranks=2, num_microbatches=2))))
    assert legs == {0: 0, 1: 0, 2: None}
    assert action_colour(Action.parse("2F0"), legs) == LOSS_COLOUR
    assert legend_label(Action.parse("2F0"), legs, 1) == "head and loss"
    assert legend_label(Action.parse("1REDUCE_GRAD"), legs, 1) == "gradient reduction"
