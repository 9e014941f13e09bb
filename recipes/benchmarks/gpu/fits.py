"""Trains a candidate in a thread of its own, which runs steps when it is told to, so that several can run in turn.

main thread      start --> run(3) ......................> run(3) of another one
fit's thread     set-up    batch, step, batch, step, ...  waits in its data loader for the next call of `run`
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.tensor_parallel import Mesh, StageContext, plan_parallelize
from recipes.benchmarks.gpu.card import Card
from recipes.benchmarks.gpu.models import Kind, Model, Precision, Sizes, batch_of, build

MICROBATCHES = 4
"""per step"""


@dataclass(frozen=True)
class Candidate:
    """A way to train: the plain Trainer, the same with 3-D layers on one rank, or the strategy with waves."""

    waves: int = 0
    """of the strategy; 0: the plain Trainer, which accumulates the gradients of the same micro-batches"""
    has_3d_layers: bool = False
    is_compiled: bool = False
    """whether `block.compile()` was called for each block"""

    @property
    def label(self) -> str:
        """Its name in tables."""
        name = f"strategy, P=1 W={self.waves}" if self.waves else "3-D layers, (1,1,1)" if self.has_3d_layers else PLAIN
        return name + (COMPILED if self.is_compiled else "")


PLAIN, COMPILED = "plain Trainer", ", compiled"
EAGER = Candidate(), Candidate(waves=2), Candidate(has_3d_layers=True)
ALL = *EAGER, *(Candidate(one.waves, one.has_3d_layers, True) for one in EAGER)


@dataclass(frozen=True)
class Case:
    """A model and its batches."""

    kind: Kind
    sizes: Sizes
    samples: int
    """per micro-batch"""
    sequence: int
    candidates: tuple[Candidate, ...] = EAGER
    precision: Precision = "bf16-true"

    @property
    def tokens(self) -> int:
        """Per micro-batch."""
        return self.samples * self.sequence

    @property
    def num_actions(self) -> int:
        """Forwards and backwards of single blocks in a step."""
        return 2 * self.sizes.num_blocks * MICROBATCHES


class SteppedFit:
    """One fit. Its constructor returns when the fit is set up and waits for its first batch.

    Args:
        case: what is trained.
        candidate: how.
        card: where.
        num_steps: how many steps `run` will run in all.

    Raises:
        Exception: whatever the fit raises, here or in `run`.
    """

    def __init__(self, case: Case, candidate: Candidate, card: Card, num_steps: int) -> None:
        self.loss = float("nan")
        """of the last step, once the fit has ended"""
        self._supply = _Supply(case, candidate, card, num_steps)
        self._losses: deque[Tensor] = deque(maxlen=self._supply.pieces_per_step)
        self._error: Exception | None = None
        arguments = (case, candidate, card)
        self._thread = threading.Thread(target=self._fit, args=arguments, name=f"fit: {candidate.label}", daemon=True)
        self._thread.start()
        self._wait()

    def run(self, num_steps: int) -> None:
        """Run steps. The device may still be busy with them afterwards."""
        for _ in range(num_steps):
            self._supply.allowed.release()
            self._wait()

    def close(self) -> None:
        """End the fit, also one that has steps left."""
        self._supply.is_abandoned = True
        self._supply.allowed.release()
        self._thread.join()

    def _wait(self) -> None:
        self._supply.reached.acquire()
        if self._error is not None:
            raise self._error

    def _fit(self, case: Case, candidate: Candidate, card: Card) -> None:
        try:
            model = build(case.kind, case.sizes, case.sequence, card.device)
            callbacks = [_Losses(self._losses), *_prepare(model, candidate, card)]
            trainer = _trainer(case, candidate, card, callbacks)
            trainer.fit(model, DataLoader(self._supply, batch_size=None, collate_fn=_ready))
            self.loss = float(sum(self._losses))
        except Exception as error:
            if not self._supply.is_abandoned:
                self._error = error
        finally:
            self._supply.reached.release()


class _Supply(Dataset[Any]):
    """Gives the fit the same batch again and again, each time after it was allowed to take it."""

    def __init__(self, case: Case, candidate: Candidate, card: Card, num_steps: int) -> None:
        shape = MICROBATCHES * case.samples, case.sequence
        batch = batch_of(case.kind, case.sizes, shape, case.precision, card.device)
        self._pieces = [batch] if candidate.waves else _split(batch, case.samples)
        self.pieces_per_step = len(self._pieces)
        self._num_steps = num_steps
        self.allowed, self.reached = threading.Semaphore(0), threading.Semaphore(0)
        self.is_abandoned = False

    def __len__(self) -> int:
        return self._num_steps * self.pieces_per_step

    def __getitem__(self, index: int) -> Any:
        step, piece = divmod(index, self.pieces_per_step)
        if piece == 0:
            self.reached.release()
            self.allowed.acquire()
            if self.is_abandoned:
                raise RuntimeError(f"the fit was ended before step {step}")
        return self._pieces[piece]


def _split(batch: Tensor | dict[str, Tensor], samples: int) -> list[Any]:
    if isinstance(batch, Tensor):
        return list(batch.split(samples))
    names, columns = batch.keys(), (tensor.split(samples) for tensor in batch.values())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


class _Losses(Callback):
    """Keeps the last losses. The plain Trainer has divided each by the number of micro-batches, so their sum counts."""

    def __init__(self, losses: deque[Tensor]) -> None:
        self._losses = losses

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._losses.append(outputs["loss"])


class _StageRuns(Callback):
    """Tells the 3-D layers of a plain Trainer what a stage would tell them."""

    def __init__(self, context: StageContext) -> None:
        self._context = context

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % MICROBATCHES == 0:
            self._context.begin_batch()
        self._context.before_forward(0)

    @override
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._context.before_backward(0)


def _prepare(model: Model, candidate: Candidate, card: Card) -> Sequence[Callback]:
    """Convert and compile the blocks; return the callbacks that they need."""
    blocks, callbacks = list(model.blocks), []
    if candidate.has_3d_layers:
        mesh = Mesh.single()
        context = StageContext(mesh)
        plan_parallelize(blocks, "blocks", mesh.sizes).install(blocks, context)
        callbacks.append(_StageRuns(context))
    if candidate.is_compiled:
        for block in blocks:
            block.compile(backend=card.compiler, dynamic=False)
    return callbacks


def _trainer(case: Case, candidate: Candidate, card: Card, callbacks: Sequence[Callback]) -> L.Trainer:
    ours = HanayoStrategy(num_microbatches=MICROBATCHES, num_waves=candidate.waves) if candidate.waves else "auto"
    return L.Trainer(
        accelerator=card.accelerator,
        devices=1,
        strategy=ours,
        precision=case.precision,
        accumulate_grad_batches=1 if candidate.waves else MICROBATCHES,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _ready(batch: Any) -> Any:
    """Says that the loader gives batches, and not samples."""
    return batch
