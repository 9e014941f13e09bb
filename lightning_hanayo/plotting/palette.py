"""Chooses the colour of each action, by its kind and its wave leg, so that the zig-zag of a wave can be seen.

A leg is one pass of the micro-batches over the ranks. The legs of a rank's stages are numbered in the order of stages:

wave, W = 1

rank 0   0           7
rank 1     1       6
rank 2       2   5
rank 3         3 4
          leg 0   leg 1

Forward is blue, backward in one piece orange, input gradient red, weight gradient grey; legs 0, 2, ... (down the ranks
in a wave) are bolder than 1, 3, ... (up). Head and loss are nearly black, gradient reductions green. All colours can be
told apart with any kind of colour blindness, which the tests check.
"""

from collections.abc import Iterable, Mapping

from lightning_hanayo.schedule import Action, Kind, Span, Timeline

KIND_COLOURS = {
    Kind.F: ("#4484c6", "#a3c9ee"),
    Kind.B: ("#e69a2e", "#f8d595"),
    Kind.I: ("#b8483c", "#e2a096"),
    Kind.W: ("#6f6b7a", "#b3afbc"),
}
"""for even and for odd legs"""
KIND_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
KIND_NAMES |= {Kind.REDUCE_GRAD: "gradient reduction"}
REDUCE_COLOUR = "#2a9d7c"
LOSS_COLOUR = "#33264d"
IDLE_COLOUR = "#f4f1ea"
ACTIVATION_COLOUR = "#8fa9a0"
DARK, LIGHT = "#1c1c1c", "#ffffff"
"""text on light and on dark boxes"""


WaveLegs = Mapping[int, int | None]
"""the leg of each stage of a timeline; None for a stage that holds only head and loss"""


def wave_legs(timeline: Timeline) -> WaveLegs:
    """The legs of a timeline's stages, derived from the rank and the micro-batches of each stage's actions."""
    num_stages = [0] * timeline.num_ranks
    legs: dict[int, int | None] = {}
    for stage, rank in sorted(timeline.rank_of.items()):
        is_loss = bool(timeline.shares) and timeline.shares[stage] == 0
        legs[stage] = None if is_loss else num_stages[rank]
        num_stages[rank] += not is_loss
    return legs


def action_colour(action: Action, legs: WaveLegs) -> str:
    """The colour of the action's box."""
    if action.kind is Kind.REDUCE_GRAD:
        return REDUCE_COLOUR
    leg = legs[action.stage]
    return LOSS_COLOUR if leg is None else KIND_COLOURS[action.kind][leg % 2]


def text_colour(background: str) -> str:
    """The colour of text that can be read on `background`.

    Example:
        >>> text_colour("#ffffff"), text_colour("#33264d")
        ('#1c1c1c', '#ffffff')
    """
    red, green, blue = (int(background[at : at + 2], 16) for at in (1, 3, 5))
    return DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 115 else LIGHT


def legend_label(action: Action, legs: WaveLegs, count: int) -> str:
    """The legend's text for the action's colour, in pictures of stages on `count` legs."""
    name, leg = KIND_NAMES[action.kind], legs[action.stage]
    if action.kind is Kind.REDUCE_GRAD:
        return name
    if leg is None:
        return "head and loss"
    numbers = range(leg % 2, count, 2)
    return name if count == 1 else f"{name}, leg{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def drawn_spans(timeline: Timeline) -> list[Span]:
    """The spans that have a box: those of compute actions and gradient reductions that take time."""
    return [span for span in timeline.spans if span.end > span.start and not span.action.kind.is_message]


def legend_entries(timelines: Iterable[Timeline]) -> dict[str, str]:
    """The meaning of each colour in these timelines, as label -> colour, forwards first."""
    labels: dict[str, str] = {}
    order = list(Kind)
    drawn = [(timeline, wave_legs(timeline)) for timeline in timelines]
    count = max((len({*legs.values()} - {None}) for _, legs in drawn), default=1)
    found = ((span.action, legs) for timeline, legs in drawn for span in drawn_spans(timeline))
    for action, legs in sorted(found, key=lambda one: (order.index(one[0].kind), one[0].stage)):
        labels.setdefault(action_colour(action, legs), legend_label(action, legs, count))
    return {label: colour for colour, label in labels.items()}
