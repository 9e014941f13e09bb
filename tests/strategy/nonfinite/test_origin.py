"""Of all places that ranks have found, the first one is named: of a micro-batch whose loss or gradients aren't finite.

stage        0        1        2         3
blocks       a.0 a.1  a.2 a.3  a.4 a.5   a.6
rank         0        1        1         0
"""

import pytest

from lightning_hanayo.pipeline_parallel.nan import BEFORE_STACK, Place
from lightning_hanayo.strategy.nonfinite import BlockNames, Finding, described, first_of, loss_is_finite

BLOCKS = BlockNames([f"a.{i}" for i in range(7)], [range(2), range(2, 4), range(4, 6), range(6, 7), range(0)])


def forward(index: int, microbatch: int = 0, batch: int = 0, pass_number: int = 0) -> Place:
    return Place(batch, microbatch, pass_number, "forward", index)


def backward(stage: int, microbatch: int = 0, pass_number: int = 0) -> Place:
    return Place(0, microbatch, pass_number, "backward", stage)


def loss(microbatch: int = 0) -> Place:
    return Place(0, microbatch, 0, "loss")


Found = dict[int, list[Place]]
"""by rank"""


def findings(found: Found) -> list[Finding]:
    return [Finding(rank, [(place, True) for place in places], ["a.0.w"]) for rank, places in found.items()]


FIRST: dict[str, tuple[Found, int, Place]] = {
    "forward": ({0: [loss(), forward(6)], 1: [forward(3), forward(4)]}, 1, forward(3)),
    "loss": ({0: [loss(), backward(3)], 1: [backward(2)]}, 0, loss()),
    "backward": ({0: [], 1: [backward(1), backward(2)]}, 1, backward(2)),
    "several micro-batches": ({0: [loss(1), loss(2)], 1: [forward(5, 1), forward(2, 2)]}, 1, forward(5, 1)),
    "harmless infinite output": ({0: [loss(2)], 1: [forward(2, 1), forward(4, 2)]}, 1, forward(4, 2)),
    "input": ({0: [forward(0), forward(BEFORE_STACK), loss()]}, 0, forward(BEFORE_STACK)),
    "later pass": ({0: [forward(0, pass_number=1), loss()], 1: [forward(5)]}, 1, forward(5)),
    "backward of the later pass": ({0: [backward(1), backward(3, pass_number=1)]}, 0, backward(3, pass_number=1)),
    "two replicas": ({2: [forward(3)], 0: [forward(3)]}, 0, forward(3)),
    "forward alone": ({0: [forward(3, batch=1)]}, 0, forward(3, batch=1)),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_place_is_found(name: str) -> None:
    found, rank, place = FIRST[name]
    origin = first_of(findings(found))
    assert origin is not None and origin[:2] == (rank, place)


TEXTS: dict[str, tuple[list[Finding], str]] = {
    "block": (
        findings({1: [forward(3)]}),
        "forward of a.3 (stage 1), micro-batch 0, on rank 1 (place 1), which",
    ),
    "batch": (findings({1: [forward(3, 2, 1)]}), "micro-batch 2 of batch 1 of those that accumulate, on"),
    "stage": (findings({1: [backward(2)]}), "the backward of a.4 to a.5 (stage 2), micro-batch 0"),
    "stage of one block": (findings({0: [backward(3)]}), "the backward of a.6 (stage 3), "),
    "loss stage": (findings({0: [backward(4)]}), "the backward of the loss (stage 4), "),
    "parameters": (
        [Finding(0, [], []), Finding(1, [], ["b", "a", "d", "c"])],
        "only in gradients of parameters: a, b, c and 1 more, on rank 1 (place 1)",
    ),
    "nowhere": ([Finding(0, [], [])], "no longer known where"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_it_is_said_in_words(name: str) -> None:
    found, text = TEXTS[name]
    assert text in described(found, BLOCKS, lambda rank: f"place {rank}")


def test_losses_are_finite_unless_one_was_found() -> None:
    assert loss_is_finite(findings({0: [backward(1)], 1: [forward(2)]}))
    assert not loss_is_finite(findings({0: [backward(1)], 1: [loss()]}))


def test_parameters_belong_to_the_stage_of_their_block() -> None:
    assert [BLOCKS.stage_of(name) for name in ("a.0.w", "a.3.w", "a.6.w", "head.w")] == [0, 1, 3, 0]
