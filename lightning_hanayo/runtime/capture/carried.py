"""What travels with a micro-batch besides the blocks' arguments: values that the step and the blocks leave for others.

    step's thread    leave() -> tree                                                deliver(tree) ... end()
    stage 1                     running(tree): blocks read and add -> tree
    stage 2                                                           running(tree) -> tree

A carrier knows one kind of values: attributes of modules, outputs that transformers records, calls of `self.log`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn


@dataclass(eq=False)
class BlockRun:
    """A stage's blocks while they run for one micro-batch."""

    blocks: Sequence[nn.Module]
    is_last: bool
    """whether the last of them is the last one of the stack"""
    output: Any = None
    """the output of the last of them, once they have run"""


class Carrier(Protocol):
    """One kind of values. Trees are None (nothing to carry), or what a `Flattener` can flatten.

    On ranks with user code, per micro-batch:  enter, begin_recording, leave, ..., enter, deliver, end, where a step
    that passes the stack again records and leaves again instead of ending. On all:  running, for each stage.
    """

    def begin_batch(self) -> None:
        """Called before each batch."""

    def enter(self) -> None:
        """Called before user code starts or continues."""

    def undo(self) -> None:
        """Called after a dry run of user code: undo what it has changed since `enter`."""

    def begin_recording(self) -> None:
        """Called in the step's thread before the first call in a pass of a block that doesn't run in the step."""

    def leave(self, earlier: Any, *, begins_pass: bool = True) -> tuple[Any, Any]:
        """Called in the step's thread when it is suspended; `begins_pass`: for the first time in this pass.

        Returns a tree to send, and what `deliver` needs. `earlier` is what `deliver` returned after an earlier
        suspension, or None.
        """

    def running(self, tree: Any, run: BlockRun) -> AbstractContextManager[list[Any]]:
        """Make the tree's values known to the blocks of `run`; the list's one item is the tree for the next stage."""

    def deliver(self, tree: Any, left: Any) -> Any:
        """Called in the step's thread when it continues: make the values known to it. Returns what `end` needs."""

    def end(self, delivered: Any) -> None:
        """Called when the step has ended."""


class Carriers:
    """All carriers of one rank, in the same order on all ranks."""

    def __init__(self, carriers: Sequence[Carrier] = ()) -> None:
        self._carriers = tuple(carriers)

    def begin_batch(self) -> None:
        """Called before each batch."""
        for carrier in self._carriers:
            carrier.begin_batch()

    def enter(self) -> None:
        """Called before user code starts or continues."""
        for carrier in self._carriers:
            carrier.enter()

    def undo(self) -> None:
        """Called after a dry run of user code."""
        for carrier in self._carriers:
            carrier.undo()

    def begin_recording(self) -> None:
        """Called in the step's thread before the first call in a pass of a block that doesn't run in the step."""
        for carrier in self._carriers:
            carrier.begin_recording()

    def leave(self, earlier: Sequence[Any], *, begins_pass: bool = True) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What the step leaves: a tree for each carrier, and what each needs to deliver. `earlier` is () at first."""
        before = earlier or [None] * len(self._carriers)
        pairs = zip(self._carriers, before, strict=True)
        left = [carrier.leave(own, begins_pass=begins_pass) for carrier, own in pairs]
        return tuple(tree for tree, _ in left), tuple(own for _, own in left)

    def running(self, trees: Sequence[Any], run: BlockRun) -> AbstractContextManager[list[list[Any]]]:
        """Make the trees' values known to the blocks of `run`; `carried_after` reads what it gives, at the end."""
        return self._running(trees, run) if self._carriers else nullcontext([])

    @contextmanager
    def _running(self, trees: Sequence[Any], run: BlockRun) -> Iterator[list[list[Any]]]:
        with ExitStack() as stack:
            yield [
                stack.enter_context(carrier.running(tree, run))
                for carrier, tree in zip(self._carriers, trees, strict=True)
            ]

    def quiet(self, block: nn.Module) -> AbstractContextManager[Any]:
        """Inside it, once more, the block may run without a step: what it logs and records is dropped."""
        return self.running([None] * len(self._carriers), BlockRun([block], is_last=False))

    def deliver(self, trees: Sequence[Any], left: Sequence[Any]) -> tuple[Any, ...]:
        """Make the values known to the step."""
        return tuple(carrier.deliver(tree, own) for carrier, tree, own in zip(self._carriers, trees, left, strict=True))

    def end(self, delivered: Sequence[Any]) -> None:
        """Called when the step has ended."""
        for carrier, own in zip(self._carriers, delivered, strict=True):
            carrier.end(own)


def carried_after(collected: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The trees for the next stage, from what `Carriers.running` has yielded."""
    return tuple([tree for (tree,) in collected])


def merged(early: Sequence[Any], late: Sequence[Any]) -> tuple[Any, ...]:
    """The trees of a step that is suspended twice: what it has added since is part of `late`."""
    return tuple(a | b if a and b else a or b for a, b in zip(early, late, strict=True))


NO_CARRIERS = Carriers()
