"""Palette: the colour of an action, by kind and leg, so that a zig-zag can be seen.

Forward is blue, backward in one piece orange, input gradient red, weight gradient grey; legs 0, 2, ... (down the ranks
in a wave) are darker than 1, 3, ... (up). Head and loss are nearly black, gradient reductions green. Chosen so that
kinds and legs stay apart for colour-blind readers too, which the tests check.
"""

from lightning_hanayo.plotting.legs import Legs
from lightning_hanayo.schedule import Action, Kind

SHADES = {
    Kind.F: ("#4484c6", "#a3c9ee"),
    Kind.B: ("#e69a2e", "#f8d595"),
    Kind.I: ("#b8483c", "#e2a096"),
    Kind.W: ("#6f6b7a", "#b3afbc"),
}
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
REDUCE = "#2a9d7c"
LOSS = "#33264d"

IDLE = "#f4f1ea"
HELD = "#8fa9a0"
"""activations"""
DARK, LIGHT = "#1c1c1c", "#ffffff"
"""text on light and on dark boxes"""


def colour(action: Action, legs: Legs) -> str:
    """The colour of `action`."""
    if action.kind is Kind.REDUCE_GRAD:
        return REDUCE
    leg = legs.of[action.stage]
    return LOSS if leg is None else SHADES[action.kind][leg % 2]


def ink(shade: str) -> str:
    """The colour of text that can be read on `shade`.

    Example:
        >>> ink("#ffffff"), ink("#33264d")
        ('#1c1c1c', '#ffffff')
    """
    red, green, blue = (int(shade[at : at + 2], 16) for at in (1, 3, 5))
    return DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 115 else LIGHT


def name(action: Action, legs: Legs) -> str:
    """What the legend says about that colour."""
    if action.kind is Kind.REDUCE_GRAD:
        return "gradient reduction"
    leg = legs.of[action.stage]
    if leg is None:
        return "head and loss"
    if legs.count == 1:
        return NAMES[action.kind]
    if legs.directions:
        return f"{NAMES[action.kind]}, {('down', 'up')[leg % 2]} the ranks"
    numbers = [number for number in range(legs.count) if number % 2 == leg % 2]
    shown = ", ".join(map(str, numbers if action.kind is Kind.F else numbers[::-1]))
    return f"{NAMES[action.kind]}, leg {shown}"
