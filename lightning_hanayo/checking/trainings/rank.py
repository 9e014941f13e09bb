"""One rank of a run: its random numbers, its precision, its Trainer; and its errors as values that can be returned."""

import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader, default_collate

from lightning_hanayo.checking.case import Case, RankFailure, RankResult
from lightning_hanayo.errors import HanayoError, PeerFailed


def rank_of_run(function: Callable[..., RankResult]) -> Callable[..., RankResult | RankFailure]:
    """Let a function of a `Case` run as a rank: seeded, in the case's precision, and without raising."""

    @wraps(function)
    def run(case: Case, *arguments: Any) -> RankResult | RankFailure:
        try:
            with _dtype(case.dtype), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                seed_everything(case.seed, verbose=False)
                result = function(case, *arguments)
        except (Exception, SystemExit) as error:
            return _failure(error)
        texts = dict.fromkeys(str(one.message) for one in caught)
        result.warnings = tuple(text for text in texts if "micro-batch" in text)  # the strategy's, not Lightning's
        return result

    return run


def make_trainer(case: Case, *observers: Callback, **options: Any) -> Trainer:
    """A Trainer on CPUs, without output, that trains as many steps as the case has.

    The user's callbacks come before the `observers`.
    """
    return Trainer(
        accelerator="cpu",
        max_steps=case.steps,
        max_epochs=1,
        accumulate_grad_batches=case.trainer.accumulate_grad_batches,
        gradient_clip_val=case.trainer.gradient_clip_val,
        gradient_clip_algorithm=case.trainer.gradient_clip_algorithm,
        callbacks=[*case.trainer.callbacks, _LenientSchedulers(), *observers],
        plugins=[LightningEnvironment()],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def make_loader(case: Case, data_rank: int) -> Any:
    """A loader of the data rank's batches, as they are; or several, as the user has."""
    return _loaders(case.batches_of(data_rank), case.loaders, case.are_collated)


def _loaders(batches: Sequence[Any], shape: Any, are_collated: bool) -> Any:
    if isinstance(shape, dict):
        return {key: _loaders([batch[key] for batch in batches], inner, are_collated) for key, inner in shape.items()}
    if isinstance(shape, list):
        return [_loaders([batch[i] for batch in batches], inner, are_collated) for i, inner in enumerate(shape)]
    return _BatchLoader(batches, batch_size=None, collate_fn=default_collate if are_collated else _unchanged)  # type: ignore[arg-type]


class _BatchLoader(DataLoader[Any]):
    """Gives batches as they are. Its `collate_fn` has made them: the strategy reads it, and nothing calls it."""

    def __iter__(self) -> Any:
        return iter(self.dataset)


class _LenientSchedulers(Callback):
    """Lets schedulers skip what they monitor: a check doesn't validate."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            config.strict = False


def _unchanged(batch: Any) -> Any:
    return batch


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors that user code makes have this precision, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _failure(error: BaseException) -> RankFailure:
    return RankFailure(
        int(os.environ.get("RANK", 0)),
        type(error).__name__,
        str(error),
        "".join(traceback.format_exception(error)),
        is_refusal=isinstance(error, HanayoError),
        is_consequence=isinstance(error, PeerFailed),
    )
