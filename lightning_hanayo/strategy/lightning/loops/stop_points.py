"""Where a run can be stopped by a signal: before each batch of training and evaluation, and where an evaluation ends.

fit_loop     epoch_loop.advance                 before the batch is read
val_loop     _evaluation_step                   after it is read: a validation that is stopped is run anew
             _store_dataloader_outputs          data ranks may have different numbers of batches
predict_loop _predict_step, on_run_end
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_hanayo.runtime.generators import generator_states, set_generators
from lightning_hanayo.strategy.groups.on_all_ranks import on_all_ranks
from lightning_hanayo.strategy.lightning.loops.loader_states import generators_of_loaders
from lightning_hanayo.strategy.stopping.stop_together import Decision, Place, StopTogether
from lightning_hanayo.strategy.temporary_attributes import Substitute, TemporaryAttributes

_MANY = 1 << 32
"""more batches than one evaluation has"""


class StopPoints:
    """Asks before each batch whether the run goes on.

    Args:
        trainer: whose loops run.
        stop: this rank's.
        device: this rank's.
        end: ends the run; called on all ranks after the same batch.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        stop: StopTogether,
        device: torch.device,
        end: Callable[["StopPoints", Decision], object],
    ) -> None:
        self.trainer = trainer
        self._stop, self._device, self._end = stop, device, end
        self._place: Place = (0, 0)
        self._is_evaluating = False
        self._random_before: dict[str, Tensor] = {}
        self._loaders_before: list[tuple[torch.Generator, Tensor]] = []
        self._weights_before: list[Tensor] = []
        self._is_epoch_start = False
        self._goes_on: bool | None = None

    @property
    def num_trained(self) -> int:
        """The training batches of this run."""
        return self._place[0]

    def add(self, attributes: TemporaryAttributes) -> None:
        """Add them to the Trainer's loops, until the attributes are restored."""
        trainer: Any = self.trainer
        self._before(attributes, trainer.fit_loop.epoch_loop, "run", self._begin_epoch)
        self._before(attributes, trainer.fit_loop.epoch_loop, "advance", self._train)
        validation = trainer.fit_loop.epoch_loop.val_loop
        self._before(attributes, validation, "run", self._begin_validation)
        for loop in (validation, trainer.validate_loop, trainer.test_loop):
            self._before(attributes, loop, "_evaluation_step", self._evaluate)
            self._before(attributes, loop, "_store_dataloader_outputs", self._end_loader)
        self._before(attributes, trainer.predict_loop, "_predict_step", self._evaluate)
        self._before(attributes, trainer.predict_loop, "on_run_end", self._end_loader)

    @contextmanager
    def as_after_batch(self) -> Iterator[None]:
        """Inside it, loops and generators are as a run must find them that goes on after the last training batch.

        A validation that was stopped has begun its first batch there, and not ended it: Lightning runs it anew. An
        epoch of which no batch was trained begins anew, too: its loader draws the order of samples again.
        """
        if self._is_epoch_start and not self._is_evaluating:
            self._rewind_random()
        if not self._is_evaluating:
            yield
            return
        validated: Any = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress
        before = validated.state_dict()
        self._rewind_random()
        for progress, completed in ((validated.current, 0), (validated.total, validated.total.completed)):
            progress.ready = progress.started = completed + 1
            progress.processed = progress.completed = completed
        try:
            yield
        finally:
            validated.load_state_dict(before)

    def _begin_epoch(self) -> None:
        self._remember_random()
        self._is_epoch_start = True

    def _train(self) -> None:
        self._begin((self._place[0] + 1, 0))
        self._is_epoch_start = False

    def _remember_random(self) -> None:
        of_loaders = generators_of_loaders(self.trainer)
        self._random_before = generator_states(self._device)
        self._loaders_before = [(one, one.get_state()) for one in of_loaders.values()]

    def _rewind_random(self) -> None:
        set_generators(self._random_before, self._device)
        for generator, state in self._loaders_before:
            generator.set_state(state)

    def _begin_validation(self) -> None:
        self._remember_random()
        self._weights_before = self._weights()

    def _evaluate(self) -> None:
        self._begin((self._place[0], self._place[1] + 1))

    def _end_loader(self) -> None:
        self._begin((self._place[0], (self._place[1] // _MANY + 1) * _MANY))

    def _begin(self, place: Place) -> None:
        decision = self._stop.begin(place)
        self._is_evaluating = place[1] > 0
        if decision is not None and not self._must_end_validation(decision):
            self._end(self, decision)
        self._place = place

    def _must_end_validation(self, decision: Decision) -> bool:
        """Whether hooks have put other weights, such as an average, in place for a validation of `fit`.

        A checkpoint would have them as the trained ones. The hooks at the end of the validation put these back.
        """
        can_save = self.trainer.state.fn == TrainerFn.FITTING and self.num_trained > 0
        if not self._is_evaluating or not can_save or decision.last is None:
            return False
        if self._goes_on is None:  # all ranks stop here for the first time
            current = self._weights()
            same = [torch.equal(*pair) for pair in zip(self._weights_before, current, strict=False)]
            changed = len(self._weights_before) != len(current) or not all(same)
            self._goes_on = any(on_all_ranks(lambda: changed))
        return self._goes_on

    def _weights(self) -> list[Tensor]:
        """A figure for each parameter of this rank, which stays on its device."""
        with self.trainer.strategy._unguarded():  # type: ignore[attr-defined]
            return [
                torch.linalg.vector_norm(one.detach())
                for one in self.trainer.lightning_module.parameters()
                if not one.is_meta and one.is_floating_point()
            ]

    @staticmethod
    def _before(attributes: TemporaryAttributes, loop: Any, name: str, ask: Callable[[], None]) -> None:
        def ask_first(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            ask()
            return method(*args, **kwargs)

        attributes.set(loop, name, Substitute(getattr(loop, name), ask_first))
