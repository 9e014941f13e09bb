"""Rejects a step that reaches the stack with other parameters in modules: torch.func.functional_call puts them there.

step 0   functional_call(model, weights, x):  weights in, ... suspended ...,  own parameters again
step 1                                                   begins here, and would find step 0's weights
"""

from torch import nn

from lightning_hanayo.errors import UnsupportedError


class ReplacedParameters:
    """Compares the parameter objects of `model` with those at the beginning of a batch; 0.1 us each."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module._parameters) for name, module in model.named_modules() if module._parameters]
        self._known: list[list[nn.Parameter | None]] = []

    def begin_batch(self) -> None:
        """Called before each batch."""
        self._known = [list(parameters.values()) for _, parameters in self._modules]

    def check(self) -> None:
        """Called when a step is suspended at the stack.

        Raises:
            UnsupportedError: a module holds another parameter than at the beginning of the batch.
        """
        for (name, parameters), known in zip(self._modules, self._known, strict=True):
            for (key, now), before in zip(parameters.items(), known, strict=True):
                if now is not before:
                    raise UnsupportedError(
                        f"{name}{name and '.'}{key} is replaced while the stack is called "
                        f"(torch.func.functional_call), but the blocks run on several ranks, and the steps of other "
                        f"micro-batches run in between. "
                        f"Call it for a module before or after the stack, or inside a block."
                    )
