"""Palette: the colour of an action, by kind and, for waves, by leg, so that the zig-zag can be seen.

Forward is blue and backward orange, legs 0, 2, ... (down the ranks in a wave) darker than 1, 3, ... (up); a split
backward has green input gradients and grey weight gradients; head and loss are red, gradient reductions violet.
"""

from lightning_hanayo.schedule import Action, Kind

_SHADES = {
    Kind.F: ("#4c86c6", "#9dc3ea"),
    Kind.B: ("#e8a33d", "#f6d08f"),
    Kind.I: ("#5fa55a", "#abd6a4"),
    Kind.W: ("#9a9a9a", "#cccccc"),
}
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
_REDUCE = "#8e6bb5"
_LOSS = "#c8553d"

IDLE = "#f4f1ea"


def colour(action: Action, leg: int | None) -> str:
    """The colour of `action`, whose stage lies on leg `leg` of the placement; None: it is the loss stage."""
    if action.kind is Kind.REDUCE_GRAD:
        return _REDUCE
    if leg is None:
        return _LOSS
    return _SHADES[action.kind][leg % 2]


def name(action: Action, leg: int | None, num_legs: int) -> str:
    """What the legend says about that colour."""
    if action.kind is Kind.REDUCE_GRAD:
        return "gradient reduction"
    if leg is None:
        return "head and loss"
    if num_legs == 1:
        return _NAMES[action.kind]
    forward = action.kind is Kind.F
    numbers = [number for number in range(num_legs) if number % 2 == leg % 2]
    shown = ", ".join(map(str, numbers if forward else numbers[::-1]))
    return f"{_NAMES[action.kind]}, leg {shown}"
