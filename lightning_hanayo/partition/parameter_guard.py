"""Guards parameters of which this rank holds a part or nothing, while user code runs.

    scope        runs on                     guarded
    "off"        -                           none: Lightning, optimizers, our layers
    "step"       the ranks of pipeline       placeholders, and parts of the blocks; parameters outside the stack
                 rank 0                      are whole while a batch runs
    "hook"       all ranks                   placeholders, and all parts
    "alone"      as the step                 as in a hook, but what is done to a placeholder is done nowhere

Between runs `after_run` guards what is guarded in hooks.
Guarded parameters take a class that checks what is done with them, and get their own class back afterwards: optimizers
and 3-D layers find plain parameters, and nothing costs time but entering and leaving.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hanayo.partial_values import Part, PartialParameter
from lightning_hanayo.partition.missing_values import Drawn, GuardedPlaceholder, Owner
from lightning_hanayo.partition.ownership import Placeholder

Scope = Literal["off", "step", "hook", "alone"]


class _Guarded(NamedTuple):
    parameter: nn.Parameter
    own_class: type[nn.Parameter]
    class_in_user_code: type[nn.Parameter]


class ParameterGuard:
    """The guarded parameters of one run.

    Args:
        device: where this rank's parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self.scope: Scope = "off"
        self.hook_name = ""
        """the hook that runs; empty in a step"""
        self.device = device
        self.after_step: Callable[[], None] = _ignore
        """called each time when code of a step has run"""
        self.before_user_code: Callable[[], None] = _ignore
        """called each time before user code begins"""
        self.after_user_code: Callable[[], None] = _ignore
        """called each time when user code has ended"""
        self.after_registering: Callable[[], None] = _ignore
        """called at the end of a hook that runs on all ranks, if it has registered parameters or modules"""
        self.num_registered = 0
        """how often any module was given a parameter or a child"""
        self.num_entered = 0
        """how often user code began or ended: others see that this rank moves"""
        self._drawn = Drawn()
        self._own: list[nn.Parameter] = []
        self._guarded: dict[Scope, list[_Guarded]] = {}
        self._placeholder_class = type("GuardedPlaceholder", (GuardedPlaceholder,), {"user_code": self})

    def watch(
        self,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, int],
        shapes: Mapping[Tensor, tuple[int, ...]],
        guarded_in_steps: set[Tensor],
    ) -> None:
        """Say which parameters to guard.

        Args:
            parameters: all of the model, by qualified name.
            owners: the pipeline rank of each.
            shapes: the whole shapes of those of which this rank holds a part.
            guarded_in_steps: those of the latter that are parts in a step, too.
        """
        missing, parts = [], []
        for name, parameter in parameters.items():
            if isinstance(parameter, Placeholder):
                vars(parameter)["_owner"] = Owner(name, owners[name], self.device, drawn=self._drawn)
                missing.append(_Guarded(parameter, Placeholder, self._placeholder_class))
            elif parameter in shapes or parameter in guarded_in_steps:
                shape = shapes.get(parameter, tuple(parameter.shape))
                vars(parameter)["_part"] = Part(name, shape)
                parts.append(_Guarded(parameter, type(parameter), PartialParameter))
        self._own = [parameter for parameter in parameters.values() if not isinstance(parameter, Placeholder)]
        in_hooks = [*missing, *(part for part in parts if part.parameter in shapes)]
        in_steps = [*missing, *(part for part in parts if part.parameter in guarded_in_steps)]
        self._guarded = {"step": in_steps, "hook": in_hooks, "alone": in_hooks}

    def end(self) -> list[nn.Parameter]:
        """After the run: guard nothing any more; return the placeholders, and the parameters that are parts."""
        self._enter("off", "")
        partial = [one.parameter for one in self._guarded.get("hook", ())]
        for one in self._guarded.get("step", ()):
            if not any(one.parameter is other for other in partial):
                del vars(one.parameter)["_part"]  # whole here, though its gradient isn't
        self._guarded = {}
        return partial

    @contextmanager
    def during(self, scope: Scope, hook_name: str = "") -> Iterator[None]:
        """Guard what `scope` says; afterwards as before."""
        before = self.scope, self.hook_name
        self._enter(scope, hook_name)
        try:
            yield
        finally:
            self._enter(*before)

    @contextmanager
    def hook(self, scope: Scope, name: str) -> Iterator[None]:
        """While a hook runs."""
        num_registered = self.num_registered
        with self.during(scope, name):
            yield
        if scope == "hook" and self.num_registered != num_registered:
            self.after_registering()

    def note_registration(self, *_: Any) -> None:
        """Called by torch when a module is given a parameter or a child."""
        self.num_registered += 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """While the user's step runs."""
        with self.during("step"):
            yield
        self.after_step()

    @contextmanager
    def off(self) -> Iterator[None]:
        """While code runs that user code has called, and that knows of parts and placeholders.

        Example:
            >>> with guard.off():
            ...     norm = norm_over_all_ranks(parameters)  # finds plain parameters and placeholders, and their `.grad`
        """
        with self.during("off"):
            yield

    def in_this_scope(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """The function, which runs with what is guarded now: user code that is called back when the guard is off."""
        scope, hook_name = self.scope, self.hook_name

        def run() -> Any:
            with self.during(scope, hook_name):
                return function()

        return run

    @property
    def runs_on_all_ranks(self) -> bool:
        """Whether the user code that runs now runs on all pipeline ranks."""
        return self.scope in ("hook", "off")

    def has_gradients(self) -> bool:
        """Whether parameters have gradients now: all ranks have theirs from the same moment on."""
        with torch._C.DisableTorchFunctionSubclass():
            trained = [parameter for parameter in self._own if parameter.requires_grad]
            return not trained or any(parameter.grad is not None for parameter in trained)

    def _enter(self, scope: Scope, hook_name: str) -> None:
        if scope != self.scope:
            if scope != "off":
                self.before_user_code()
            for parameter, own_class, _ in self._guarded.get(self.scope, ()):
                parameter.__class__ = own_class
            for parameter, _, guarded in self._guarded.get(scope, ()):
                parameter.__class__ = guarded
            self._drawn.enter(in_hook=scope == "hook")
            if scope == "off":
                self.after_user_code()
        self.scope, self.hook_name = scope, hook_name
        self.num_entered += 1


def _ignore() -> None:
    """Called after a step, unless a run wants to know."""
