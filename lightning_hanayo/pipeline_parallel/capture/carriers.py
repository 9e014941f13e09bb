"""Carriers: values that travel with a micro-batch besides the blocks' arguments.

    step's thread    leave() -> tree                                                deliver(tree) ... end()
    stage 1                     running(tree): blocks read and add -> tree
    stage 2                                                           running(tree) -> tree

A carrier knows one kind of values: attributes of modules, calls of `self.log`, or (in this file) the outputs that
transformers records inside blocks: `output_router_logits`, `output_attentions`, `output_hidden_states`.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
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


class Carrier:
    """One kind of values. Trees are None (nothing to carry), or anything that a `Flattener` can flatten.

    A method that a carrier doesn't define does nothing.

    On ranks with user code, per micro-batch:  enter, begin_recording, leave, ..., enter, deliver, end, where a step
    that passes the stack again records and leaves again instead of ending. On all:  running, for each stage.
    """

    def begin_batch(self, num_local: int) -> None:
        """Called before each batch. Its steps run the first `num_local` blocks themselves."""

    def enter(self) -> None:
        """Called before user code starts or continues."""

    def undo(self) -> None:
        """Called after a dry run of user code: undo its changes since `enter`."""

    def begin_recording(self) -> None:
        """Called in the step's thread before the first call in a pass of a block that doesn't run in the step."""

    def leave(self, earlier: Any, *, begins_pass: bool = True) -> tuple[Any, Any]:
        """Called in the step's thread when it is suspended; `begins_pass`: for the first time in this pass.

        Returns a tree to send, and the state for `deliver`. `earlier` is the result of `deliver` after an earlier
        suspension, or None.
        """
        return None, None

    def running(self, tree: Any, run: BlockRun) -> AbstractContextManager[list[Any]]:
        """Make the tree's values known to the blocks of `run`; the list's one item is the tree for the next stage."""
        return nullcontext([tree])

    def deliver(self, tree: Any, left: Any) -> Any:
        """Called in the step's thread when it continues: make the values known to it. Returns the state for `end`."""

    def end(self, delivered: Any) -> None:
        """Called when the step has ended."""

    def now(self, tree: Any) -> Any:
        """A tree that was left, with the values that are there now, in a dry run."""
        return tree


class Carriers:
    """All carriers of one rank, in the same order on all ranks."""

    def __init__(self, carriers: Sequence[Carrier] = ()) -> None:
        self._carriers = tuple(carriers)

    def begin_batch(self, num_local: int) -> None:
        """Called before each batch. Its steps run the first `num_local` blocks themselves."""
        for carrier in self._carriers:
            carrier.begin_batch(num_local)

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
        """A tree for each carrier to send, and its state for `deliver`. `earlier` is () at first."""
        before = earlier or [None] * len(self._carriers)
        pairs = zip(self._carriers, before, strict=True)
        left = [carrier.leave(own, begins_pass=begins_pass) for carrier, own in pairs]
        return tuple(tree for tree, _ in left), tuple(own for _, own in left)

    def running(self, trees: Sequence[Any], run: BlockRun) -> AbstractContextManager[list[list[Any]]]:
        """Make the trees' values known to the blocks of `run`; `carried_after` reads the lists at the end."""
        return self._running(trees, run) if self._carriers else nullcontext([])  # the usual case costs no generator

    @contextmanager
    def _running(self, trees: Sequence[Any], run: BlockRun) -> Iterator[list[list[Any]]]:
        with ExitStack() as stack:
            yield [
                stack.enter_context(carrier.running(tree, run))
                for carrier, tree in zip(self._carriers, trees, strict=True)
            ]

    def quiet(self, block: nn.Module) -> AbstractContextManager[Any]:
        """Inside it, once more, the block may run without a step: its logs and records are dropped."""
        return self.running([None] * len(self._carriers), BlockRun([block], is_last=False))

    def deliver(self, trees: Sequence[Any], left: Sequence[Any]) -> tuple[Any, ...]:
        """Make the values known to the step."""
        return tuple(carrier.deliver(tree, own) for carrier, tree, own in zip(self._carriers, trees, left, strict=True))

    def end(self, delivered: Sequence[Any]) -> None:
        """Called when the step has ended."""
        for carrier, own in zip(self._carriers, delivered, strict=True):
            carrier.end(own)


class CarriersOfDryRun(Carriers):
    """Carry nothing: show what the step leaves in a dry run, where it has left these `trees` before."""

    def __init__(self, real: Carriers, trees: Sequence[Any]) -> None:
        super().__init__()
        self._real = real
        self._trees = trees

    def leave(self, earlier: Sequence[Any], *, begins_pass: bool = True) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The values that are there now."""
        pairs = zip(self._real._carriers, self._trees, strict=True)
        return tuple(carrier.now(tree) for carrier, tree in pairs), ()

    def deliver(self, trees: Sequence[Any], left: Sequence[Any]) -> tuple[Any, ...]:
        """Deliver nothing."""
        return ()


def carried_after(collected: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The trees for the next stage, from the lists of `Carriers.running`."""
    return tuple([tree for (tree,) in collected])


def merged(early: Sequence[Any], late: Sequence[Any]) -> tuple[Any, ...]:
    """The trees of a step that is suspended twice: additions in between are part of `late`."""
    return tuple(a | b if a and b else a or b for a, b in zip(early, late, strict=True))


NO_CARRIERS = Carriers()


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
        self._has_warned = False
        self._counts: dict[str, int] = {}
        """of the items by key that the step that runs has recorded itself"""

    def begin_recording(self) -> None:
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
                f"{names} asks for what the blocks compute inside, and in this cube they work on other parts of the "
                f"samples or features than the step. Leave it out of the model's config and call, cut another stack "
                f"with HanayoStrategy(blocks=...) if a tower's features are made of it, or set cube=1."
            )
        if "router_logits" in lists and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "output_router_logits=True: the load-balancing loss is not a mean over samples, so that of the batch "
                "is not the mean of its micro-batches'. The training equals one process that runs the same "
                "micro-batches.",
                stacklevel=2,
            )
        layers = sorted(collector[_LAYERS]) if _LAYERS in collector else None
        models = [name for name, module in self._model.named_modules() if getattr(module, _HOOKED, False)]
        wanted = {key: [self._counts.get(key, 0), []] for key in lists}
        return {"models": models, "layers": layers, "lists": wanted}, None

    @contextmanager
    def running(self, tree: Tree | None, run: BlockRun) -> Iterator[list[Tree | None]]:
        """Collect the outputs of the run's blocks."""
        if tree is None:
            yield [None]
            return
        for name in tree["models"]:  # as transformers has done on the rank that asked for outputs
            _capturing().maybe_install_capturing_hooks(self._model.get_submodule(name))
        collector = {key: [None] * count + items for key, (count, items) in tree["lists"].items()}
        active = _capturing()._active_collector
        token = active.set(collector)
        result: list[Tree | None] = [tree]
        try:
            yield result
        finally:
            active.reset(token)
        if run.is_last:  # the step's own call of the last block records this block's output once more
            outputs = (run.output, *(run.output if isinstance(run.output, tuple) else ()))
            for items in collector.values():
                if items and any(items[-1] is one for one in outputs):
                    items.pop()
        if tree["layers"] is not None:
            states = collector[_STATES]
            collector[_STATES] = [one if i in tree["layers"] else None for i, one in enumerate(states)]
        lists = {key: [count, collector[key][count:]] for key, (count, _) in tree["lists"].items()}
        result[0] = tree | {"lists": lists}

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
