"""Carriers: values that travel with a micro-batch besides the blocks' arguments.

    step's thread    leave() -> tree                                                       deliver(tree) ... end()
    stage 1              begin_blocks(tree), blocks read and add, end_blocks() -> tree
    stage 2                                             begin_blocks(tree), ..., end_blocks() -> tree

A carrier knows one kind of values: attributes of modules, calls of `self.log`, or (in this file) what blocks put into
dictionaries among their arguments, and the outputs that transformers records inside blocks: `output_router_logits`,
`output_attentions`, `output_hidden_states`.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_hanayo.errors import UnsupportedError


@dataclass(eq=False)
class BlockRun:
    """A stage's blocks while they run for one micro-batch."""

    blocks: Sequence[nn.Module]
    is_last: bool
    """whether the last of them is the last one of the stack"""
    output: Any = None
    """the output of the last of them, once they have run"""
    filled: dict[int, dict[Any, Any]] = field(default_factory=dict)
    """what blocks have put into dictionaries among their arguments, by the dictionaries' numbers"""


class Carrier:
    """One kind of values. Trees are None (nothing to carry), or anything that a `Flattener` can flatten.

    A method that a carrier doesn't define does nothing.

    On ranks with user code, per micro-batch:  enter, begin_recording, leave, ..., enter, deliver, end, where a step
    that passes the stack again records and leaves again instead of ending. On all, for each stage:  begin_blocks, then
    end_blocks, or abandon_blocks after an error.
    """

    def begin_batch(self, num_local: int) -> None:
        """Called before each batch. Its steps run the first `num_local` blocks themselves."""

    def enter(self) -> None:
        """Called before user code starts or continues."""

    def undo(self) -> None:
        """Called after a dry run of user code: undo its changes since `enter`."""

    def begin_recording(self, numbered: list[Any]) -> None:
        """Called in the step's thread before the first call in a pass of a block that doesn't run in the step.

        `numbered` is going to have the dictionaries among the blocks' arguments.
        """

    def leave(self, earlier: Any, *, begins_pass: bool = True) -> tuple[Any, Any]:
        """Called in the step's thread when it is suspended; `begins_pass`: for the first time in this pass.

        Returns a tree to send, and the state for `deliver`. `earlier` is the result of `deliver` after an earlier
        suspension, or None.
        """
        return None, None

    def begin_blocks(self, tree: Any, run: BlockRun) -> Any:
        """Called before the blocks of `run`: make the tree's values known to them. Returns the state for their end."""

    def end_blocks(self, tree: Any, run: BlockRun, begun: Any) -> Any:
        """Called when they have run. Returns the tree for the next stage."""
        return tree

    def abandon_blocks(self, begun: Any) -> None:
        """Called instead where one of them has failed."""

    def of_batch(self, trees: Sequence[Any]) -> Sequence[Any]:
        """Called where a step has run once: the last stages' trees of a batch's micro-batches, to be joined."""
        return trees

    def deliver(self, tree: Any, left: Any) -> Any:
        """Called in the step's thread when it continues: make the values known to it. Returns the state for `end`."""

    def end(self, delivered: Any) -> None:
        """Called when the step has ended."""

    def now(self, tree: Any) -> Any:
        """A tree that was left, with the values that are there now, in a dry run."""
        return tree


Carriers = tuple[Carrier, ...]
"""all carriers of one rank, in the same order on all ranks"""
NO_CARRIERS: Carriers = ()


@contextmanager
def quiet(carriers: Carriers, block: nn.Module) -> Iterator[None]:
    """Inside it, once more, the block may run without a step: its logs and records are dropped."""
    run = BlockRun([block], is_last=False)
    begun = [carrier.begin_blocks(None, run) for carrier in carriers]
    yield
    for carrier, own in zip(carriers, begun, strict=True):
        carrier.end_blocks(None, run, own)


class CarrierOfDryRun(Carrier):
    """Carries nothing: shows what the step leaves in a dry run, where it has left this `tree` before."""

    def __init__(self, real: Carrier, tree: Any) -> None:
        self._real = real
        self._tree = tree

    def leave(self, earlier: Any, *, begins_pass: bool = True) -> tuple[Any, None]:
        """The values that are there now."""
        return self._real.now(self._tree), None


def merged(early: Sequence[Any], late: Sequence[Any]) -> tuple[Any, ...]:
    """The trees of a step that is suspended twice: additions in between are part of `late`."""
    return tuple(a | b if a and b else a or b for a, b in zip(early, late, strict=True))


class FilledArguments(Carrier):
    """Carries what blocks put into dictionaries among their arguments, which the step passes to several of them.

    the step's dictionary       {}                                         {"full_attention": (k, v)}
    carried                          {}  block 3 ->  {0: {"full_attention": (k, v)}}  -> blocks 4 to 7
    """

    def __init__(self) -> None:
        self._numbered: list[Any] = []

    def begin_recording(self, numbered: list[Any]) -> None:
        """Note where the step's dictionaries are."""
        self._numbered = numbered

    def leave(self, earlier: Any, *, begins_pass: bool = True) -> tuple[None, list[Any]]:
        """Leave nothing: what the step has put into them is among the arguments."""
        return None, self._numbered

    def begin_blocks(self, tree: dict[int, Any] | None, run: BlockRun) -> None:
        """Give the blocks what earlier ones have put in."""
        run.filled = tree or {}

    def end_blocks(self, tree: dict[int, Any] | None, run: BlockRun, begun: None) -> dict[int, Any] | None:
        """Take what they have put in, too."""
        return run.filled or None

    def deliver(self, tree: dict[int, Any] | None, left: list[Any]) -> None:
        """Put all of it into the step's dictionaries."""
        for number, items in (tree or {}).items():
            left[number].update(items)


_LAYERS = "_hidden_states_layers"
"""the key under which a collector keeps which hidden states are wanted"""
_STATES = "hidden_states"
_HOOKED = "_output_capturing_hooks_installed"

Tree = dict[str, Any]
"""The names of the models with hooks, the hidden states that are wanted, and by key [count, items].

`count` is the number of items that the step's own collector has before them.
"""


class RecordedOutputs(Carrier):
    """Carries recorded outputs, on one rank, for a model that holds models of transformers.

    These put forward hooks on their modules, which append to the lists of a collector while one is active in the
    thread. The step's collector is asked for its keys; blocks that run elsewhere append to a collector of their own.

        step's collector     {"router_logits": [block 0's]}                   ... and then [block 0's, 1's, 2's, 3's]
        carried              {"router_logits": (1, [])}  ->  (1, [1's, 2's])  ->  (1, [1's, 2's, 3's])

    Unless it `accepts` them they are refused: in a cube blocks may compute parts of what the step expects.
    """

    def __init__(self, model: nn.Module, *, accepts: bool = True) -> None:
        self._model = model
        self._accepts = accepts
        self._counts: dict[str, int] = {}
        """of the items by key that the step that runs has recorded itself"""

    def begin_recording(self, numbered: list[Any]) -> None:
        """Count the step's own records: from now on its hooks record proxies, or None for unwanted ones."""
        self._counts = {key: len(items) for key, items in (_active() or {}).items()}

    def leave(self, earlier: Any, *, begins_pass: bool = True) -> tuple[Tree | None, Any]:
        """Ask for the outputs that the step's collector wants.

        Raises:
            UnsupportedError: one of them is not accepted.
        """
        collector = _active()
        if not collector or not begins_pass:
            return None, None
        lists = {key: items for key, items in collector.items() if key != _LAYERS}
        if lists and not self._accepts:
            names = ", ".join(f"output_{key}" for key in lists)
            raise UnsupportedError(
                f"{names} asks for what the blocks compute inside, and in this cube they work on parts of samples or "
                f"features. Leave it out, cut another stack with HanayoStrategy(blocks=...), or set cube=1."
            )
        layers = sorted(collector[_LAYERS]) if _LAYERS in collector else None
        models = [name for name, module in self._model.named_modules() if getattr(module, _HOOKED, False)]
        wanted = {key: [self._counts.get(key, 0), []] for key in lists}
        return {"models": models, "layers": layers, "lists": wanted}, None

    def begin_blocks(self, tree: Tree | None, run: BlockRun) -> Any:
        """Collect the outputs of the run's blocks: in a collector of its own, until it is reset with the token."""
        if tree is None:
            return None
        for name in tree["models"]:  # as transformers has done on the rank that asked for outputs
            _capturing().maybe_install_capturing_hooks(self._model.get_submodule(name))
        collector = {key: [None] * count + items for key, (count, items) in tree["lists"].items()}
        return collector, _capturing()._active_collector.set(collector)

    def abandon_blocks(self, begun: Any) -> None:
        """Collect no more."""
        if begun is not None:
            _capturing()._active_collector.reset(begun[1])

    def end_blocks(self, tree: Tree | None, run: BlockRun, begun: Any) -> Tree | None:
        """Add the outputs."""
        if tree is None:
            return None
        self.abandon_blocks(begun)
        collector, _ = begun
        if run.is_last:  # the step's own call of the last block records this block's output once more
            outputs = (run.output, *(run.output if isinstance(run.output, tuple) else ()))
            for items in collector.values():
                if items and any(items[-1] is one for one in outputs):
                    items.pop()
        if tree["layers"] is not None:
            states = collector[_STATES]
            collector[_STATES] = [one if i in tree["layers"] else None for i, one in enumerate(states)]
        lists = {key: [count, collector[key][count:]] for key, (count, _) in tree["lists"].items()}
        return tree | {"lists": lists}

    def deliver(self, tree: Tree | None, left: Any) -> Any:
        """Append the recorded outputs to the step's collector, in place of those that the blocks' own hooks added."""
        collector = _active()
        if tree is not None and collector:
            for key, (count, items) in tree["lists"].items():
                collector[key][count:] = items
        return True


def _capturing() -> Any:
    return sys.modules["transformers.utils.output_capturing"]


def _active() -> dict[str, Any] | None:
    """The collector that is active in this thread, if transformers is in use."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return capturing._active_collector.get() if capturing is not None else None
