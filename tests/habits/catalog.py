"""All habits, by the heading under which the table lists them."""

from tests.habits import (
    after_fit,
    arguments,
    batches,
    blocks,
    collecting,
    collectives,
    images,
    layers,
    losses,
    parts,
    passes,
    pretrained,
    side_outputs,
    step_state,
    whole_model,
)
from tests.habits.habit import Habit

GROUPS: dict[str, list[Habit]] = {
    "How a batch is cut": [*batches.HABITS, *images.HABITS],
    "Losses": losses.HABITS,
    "What blocks store besides their output": side_outputs.HABITS,
    "State that the step sets": step_state.HABITS,
    "What steps collect, and hooks read": collecting.HABITS,
    "Collectives in steps and hooks": collectives.HABITS,
    "Several passes through the stack": passes.HABITS,
    "Norms, clipping and optimizers": whole_model.HABITS,
    "The stack and its blocks": blocks.HABITS,
    "Arguments of blocks, and gradients inside the step": arguments.HABITS,
    "Blocks and layers of many kinds": layers.HABITS,
    "Parameters of which a rank holds a part, or nothing": parts.HABITS,
    "Pretrained weights": pretrained.HABITS,
    "After fit, and the next run": after_fit.HABITS,
}
