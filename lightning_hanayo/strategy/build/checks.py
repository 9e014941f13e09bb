"""The refusals: what a pipeline can't play, said by name before the first message."""

from collections.abc import Sequence
from math import prod
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from torch import nn, optim
from torch.optim import LBFGS, Optimizer

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.strategy.lightning.internals import takes_dataloader_iter
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.topology import Topology


def check_module(module: "pl.LightningModule", strategy: Any) -> None:
    """Refuse modules that drive their training themselves.

    Raises:
        UnsupportedError: manual optimization, `dataloader_iter`, or BatchNorm synchronised over the world.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{name} uses manual optimization (automatic_optimization=False), but a pipeline runs the backward of all "
            f"its stages itself, within the training step. Let Lightning drive the optimizer."
        )
    if takes_dataloader_iter(module):
        raise UnsupportedError(
            f"{name}.training_step takes dataloader_iter, but a pipeline cuts each batch into micro-batches. "
            f"Take `batch` instead."
        )
    if strategy._layer_sync is not None:
        raise UnsupportedError(
            "Trainer(sync_batchnorm=True) synchronises BatchNorm over all processes, which hold different stages. "
            "Leave it out; statistics are per micro-batch."
        )


def check_layers(module: nn.Module) -> None:
    """Refuse a model whose layers are spread over a cube already.

    Raises:
        UnsupportedError: another Trainer has trained it, or a copy of one.
    """
    for name, part in module.named_modules():
        if getattr(part, "shards", None):
            raise UnsupportedError(
                f"{name} holds one rank's part of its weights: another Trainer has trained this "
                f"{type(module).__name__} on a cube of ranks. Build it anew and load a checkpoint, or go on with the "
                f"same Trainer."
            )


def check_example(module: "pl.LightningModule", options: Options) -> None:
    """See that `balance="time"` has something to measure.

    Raises:
        HanayoError: the module has no `example_input_array`.
    """
    if options.balance == "time" and module.example_input_array is None:
        raise HanayoError(
            f"balance='time' measures the blocks while the model runs on example_input_array, but "
            f"{type(module).__name__} has none. Set it, or give balance one cost per block."
        )


def check_gradients(module: "pl.LightningModule", topology: Topology) -> None:
    """Refuse gradients that can't be summed in a flat buffer.

    Raises:
        UnsupportedError: an embedding with sparse gradients, and several data ranks or a cube.
    """
    for name, part in module.named_modules():
        if topology.data * prod(topology.cube) > 1 and isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise UnsupportedError(f"{name} has sparse gradients, which ranks can't sum; make it sparse=False")


def check_callbacks(trainer: Any, topology: Topology) -> None:
    """Refuse callbacks that compute with all parameters, of which a pipeline rank has only its own.

    Raises:
        UnsupportedError: weight averaging, or finetuning by Lightning's callback.
    """
    whole = (WeightAveraging, StochasticWeightAveraging, BaseFinetuning)
    for callback in trainer.callbacks:
        if topology.replica_size > 1 and isinstance(callback, whole):
            raise UnsupportedError(
                f"the callback {type(callback).__name__} computes with all parameters, but a rank holds only "
                f"its own. Leave it out, or set requires_grad and average over checkpoints yourself."
            )


def refuse_stop() -> NoReturn:
    """Refuse a step that ends the run: it runs on one rank, and the others would wait for the next batch.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "training_step set trainer.should_stop, which the other ranks of the model don't see. Set it in a hook that "
        "runs on all ranks, as on_train_batch_end, which finds what the step has logged in trainer.callback_metrics."
    )


def check_optimizers(optimizers: Sequence[Optimizer], topology: Topology) -> None:
    """Refuse optimizers that look across parameters, of which a rank has only its own, or across one, in a cube.

    Raises:
        UnsupportedError: more than one optimizer, or one that isn't elementwise.
    """
    if len(optimizers) > 1:
        raise UnsupportedError("several optimizers need manual optimization, which a pipeline can't play")
    for optimizer in optimizers:
        if topology.replica_size > 1 and isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                "LBFGS takes all parameters as one vector, but a rank holds only its own. Use an optimizer "
                "that works on each parameter alone, as AdamW."
            )
        if prod(topology.cube) > 1 and optimizer.param_groups and not is_elementwise(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} isn't known to work on each element of a parameter alone, and in a cube a "
                f"rank holds a part of each: norms, rows or whole matrices would be wrong. Use AdamW or SGD, say, or "
                f"set `is_elementwise = True` on the optimizer if it is one."
            )


_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.RMSprop,
    optim.Rprop, optim.Adadelta, optim.ASGD,
)  # fmt: skip


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether what becomes of an element depends on that element alone: torch's own, and those that say so."""
    return bool(getattr(optimizer, "is_elementwise", type(optimizer) in _ELEMENTWISE))
