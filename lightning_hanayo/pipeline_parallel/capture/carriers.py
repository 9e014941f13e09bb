"""Carries what transformers records inside blocks: `output_router_logits`, `output_attentions`, `output_hidden_states`.

Its models put forward hooks on their modules, which append to the lists of a collector while one is active in the
thread. The step's collector is asked for its keys; blocks that run elsewhere append to a collector of their own.

    step's collector     {"router_logits": [block 0's]}                   ... and then [block 0's, 1's, 2's, 3's]
    carried              {"router_logits": (1, [])}  ->  (1, [1's, 2's])  ->  (1, [1's, 2's, 3's])
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.capture.carried import BlockRun

_LAYERS = "_hidden_states_layers"
"""the key under which a collector keeps which hidden states are wanted"""
_STATES = "hidden_states"
_HOOKED = "_output_capturing_hooks_installed"

Tree = dict[str, Any]
"""The names of the models with hooks, the hidden states that are wanted, and by key [count, items].

`count` is the number of items that the step's own collector has before them.
"""


class RecordedOutputs:
    """Carries recorded outputs, on one rank, for a model that holds models of transformers.

    `accepts` says whether a key is carried: in a cube blocks may compute parts of what the step expects.
    """

    def __init__(self, model: nn.Module, accepts: Callable[[str], bool] = lambda key: True) -> None:
        self._model = model
        self._accepts = accepts
        self._has_warned = False
        self._counts: dict[str, int] = {}
        """of the items by key that the step that runs has recorded itself"""

    def begin_batch(self) -> None:
        """Do nothing."""

    enter = undo = begin_batch

    def begin_recording(self) -> None:
        """Count what the step has recorded itself: from now on its hooks record proxies, or None for unwanted ones."""
        self._counts = {key: len(items) for key, items in (_active() or {}).items()}

    def leave(self, earlier: Any, *, begins_pass: bool = True) -> tuple[Tree | None, Any]:
        """Ask for what the step's collector wants.

        Raises:
            UnsupportedError: it wants what is not accepted.
        """
        collector = _active()
        if not collector or not begins_pass:
            return None, None
        lists = {key: items for key, items in collector.items() if key != _LAYERS}
        rejected = ", ".join(f"output_{key}" for key in lists if not self._accepts(key))
        if rejected:
            raise UnsupportedError(
                f"{rejected} asks for what the blocks compute inside, and in this cube they work on other parts of the "
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
        self._install_hooks(tree["models"])
        collector = {key: [None] * count + items for key, (count, items) in tree["lists"].items()}
        active = _capturing()._active_collector
        token = active.set(collector)
        result: list[Tree | None] = [tree]
        try:
            yield result
        finally:
            active.reset(token)
        if run.is_last:  # the step's own call of the last block records this block's output once more
            for items in collector.values():
                if items and _is_output(items[-1], run.output):
                    items.pop()
        if tree["layers"] is not None:
            states = collector[_STATES]
            collector[_STATES] = [one if i in tree["layers"] else None for i, one in enumerate(states)]
        lists = {key: [count, collector[key][count:]] for key, (count, _) in tree["lists"].items()}
        result[0] = tree | {"lists": lists}

    def deliver(self, tree: Tree | None, left: Any) -> Any:
        """Append what was recorded to the step's collector, in place of what hooks of blocks themselves have added."""
        collector = _active()
        if tree is not None and collector:
            for key, (count, items) in tree["lists"].items():
                collector[key][count:] = items
        return True

    def end(self, delivered: Any) -> None:
        """Do nothing."""

    def _install_hooks(self, names: list[str]) -> None:
        """Install the hooks here, as transformers has done on the rank that asked for outputs."""
        for name in names:
            _capturing().maybe_install_capturing_hooks(self._model.get_submodule(name))


def _capturing() -> Any:
    return sys.modules["transformers.utils.output_capturing"]


def _active() -> dict[str, Any] | None:
    """The collector that is active in this thread, if transformers is in use."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return capturing._active_collector.get() if capturing is not None else None


def _is_output(item: Any, output: Any) -> bool:
    return item is output or (isinstance(output, tuple) and any(item is part for part in output))
