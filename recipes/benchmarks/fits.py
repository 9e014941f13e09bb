"""Trains in a thread of its own, which runs steps when it is told to, so that several fits can run in turn.

main thread      start --> run(3) ......................> run(3) of another one
fit's thread     set-up    batch, step, batch, step, ...  waits in its data loader for the next call of `run`
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

_NOISE = r"does not have many workers|no `val_dataloader`|isinstance\(treespec|LeafSpec|The \.grad attribute"


def new_trainer(**options: Any) -> L.Trainer:
    """A Trainer of one epoch that prints and writes nothing."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=f".*({_NOISE})")
    return L.Trainer(**{
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "use_distributed_sampler": False, **options,
    })  # fmt: skip


def fit_on_rank(rank: int, num_ranks: int, model: L.LightningModule, batches: Sequence[Any], **options: Any) -> None:
    """Fit on CPUs, as one of several processes whose process group exists."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "NODE_RANK": "0"}
    trainer = new_trainer(accelerator="cpu", devices=num_ranks, **options)
    trainer.fit(model, DataLoader(list(batches), batch_size=None))  # type: ignore[arg-type]


def random_batches(count: int, samples: int, context: int, words: int) -> list[dict[str, Tensor]]:
    """Batches of random tokens, since a step's time doesn't depend on the text."""
    tokens = torch.randint(words, (count, samples, context + 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one[:, :-1].clone(), "labels": one[:, 1:].clone()} for one in tokens]


class SteppedFit:
    """One fit. Its constructor returns when the fit is set up and waits for its first batch.

    Args:
        make: builds the module and its Trainer, in the fit's thread.
        steps: the batches of each step; several are accumulated by the Trainer.
        name: the thread's.

    Raises:
        Exception: whatever the fit raises, here or in `run`.
    """

    def __init__(
        self, make: Callable[[], tuple[L.LightningModule, L.Trainer]], steps: Sequence[Sequence[Any]], name: str
    ) -> None:
        self.losses: list[Tensor] = []
        """of each batch"""
        self.module: L.LightningModule | None = None
        self._make, self._supply = make, _Supply(steps)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._fit, name=f"fit: {name}", daemon=True)
        self._thread.start()
        self._wait()

    @property
    def loss(self) -> float:
        """Of the last step. The Trainer has divided each batch's by their number, so their sum counts."""
        return float(sum(self.losses[-self._supply.pieces_per_step :]))

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

    def _fit(self) -> None:
        try:
            self.module, trainer = self._make()
            trainer.callbacks.append(_Losses(self.losses))  # type: ignore[attr-defined]
            trainer.fit(self.module, DataLoader(self._supply, batch_size=None, collate_fn=_ready))
        except Exception as error:
            if not self._supply.is_abandoned:
                self._error = error
        finally:
            self._supply.reached.release()


def timed(fit: SteppedFit, num_steps: int, synchronize: Callable[[], object]) -> tuple[float, float]:
    """Seconds per step, by the clock and of all threads. Within them the host may run ahead of the device."""
    synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    fit.run(num_steps)
    synchronize()
    return (time.perf_counter() - start) / num_steps, (time.process_time() - cpu) / num_steps


class _Supply(Dataset[Any]):
    """Gives the fit a step's batches after it was allowed to take them."""

    def __init__(self, steps: Sequence[Sequence[Any]]) -> None:
        self._steps, self.pieces_per_step = steps, len(steps[0])
        self.allowed, self.reached = threading.Semaphore(0), threading.Semaphore(0)
        self.is_abandoned = False

    def __len__(self) -> int:
        return len(self._steps) * self.pieces_per_step

    def __getitem__(self, index: int) -> Any:
        step, piece = divmod(index, self.pieces_per_step)
        if piece == 0:
            self.reached.release()
            self.allowed.acquire()
            if self.is_abandoned:
                raise RuntimeError(f"the fit was ended before step {step}")
        return self._steps[step][piece]


class _Losses(Callback):
    """Keeps the losses."""

    def __init__(self, losses: list[Tensor]) -> None:
        self._losses = losses

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._losses.append(outputs["loss"].detach())


def _ready(batch: Any) -> Any:
    """Says that the loader gives batches, and not samples."""
    return batch
