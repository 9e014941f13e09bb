"""Lets the ranks of a cube share the tokens of a step's loss, where all of them have the same samples.

cube_outside    head and loss of a causal model of transformers     chunked_cross_entropy in the step
"share"         whole, of this rank's samples                       the same, chunk by chunk; where the step runs once
                                                                    on a whole batch, as with "replicate"
"replicate"     whole, of all samples                               of this rank's tokens
"tokens"        of this rank's rows of the weight, chunk by chunk   the same; of this rank's tokens, where the weight
                                                                    isn't a parameter
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import nn

from lightning_hanayo.chunked_loss import causal_models, token_shares
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.tensor_parallel.mesh import MeshAxis


@dataclass(eq=False, repr=False)
class TokenLosses:
    """The losses of one run in a cube."""

    model: nn.Module
    """the user's module"""
    ranks: MeshAxis
    """of the cube"""
    _: KW_ONLY
    is_required: bool
    """whether each step's loss has to be shared by tokens: `cube_outside="tokens"`"""
    is_allowed: bool = True
    """whether steps may start collectives: not where another micro-batch runs at the same time"""
    arguments: Callable[[], AbstractContextManager[None]] = nullcontext
    """to be entered while a batch runs: gathers weights for functions that can't ask how they are held"""
    _has_shared: bool = field(default=False, init=False)
    _runs_alike: bool = field(default=False, init=False)

    def start(self, set_attribute: Callable[[Any, str, Any], None]) -> None:
        """From now on losses in steps are shared; if required, also those of models that don't do it themselves.

        `set_attribute` sets an attribute of an instance for the time of the run.
        """
        if self.is_required:
            causal_models.chunk_losses(self.model, set_attribute)
        token_shares.start(self._shares)

    @contextmanager
    def in_batch(self, *, runs_alike: bool) -> Iterator[None]:
        """To be open while a batch runs, whose steps all ranks of the cube run alike, or on shares of its samples."""
        self._runs_alike = runs_alike
        try:
            with self.arguments():
                yield
        finally:
            self._runs_alike = False

    def stop(self) -> None:
        """The run has ended."""
        token_shares.stop(self._shares)

    def check(self) -> None:
        """Called before a loss's backward, on all ranks of the cube alike.

        Raises:
            UnsupportedError: losses have to be shared, and none has been yet.
        """
        if self.is_required and not self._has_shared:
            raise UnsupportedError(
                f"cube_outside='tokens': {type(self.model).__name__}.training_step has computed its loss from whole "
                "logits. Use lightning_hanayo.chunked_cross_entropy(hidden, weight, labels), or a causal model of "
                "transformers that gets the labels and has an nn.Linear head; or set cube_outside='share'."
            )

    def _shares(self) -> MeshAxis | None:
        if not self._runs_alike or not self.is_allowed:
            return None
        self._has_shared = True
        return self.ranks
