"""Runs the same training in one process, as the expected result of a pipeline run.

plain     an ordinary Trainer on the whole batch                                            (compared with a tolerance)
by_hand   a loop over the same micro-batches in the same order, with the same order of sums (compared to the last bit)
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.models import IGNORED, Batch, build
from tests.harness.pool import Pool
from tests.harness.training import Layout, Outcome, Training, fit, own_weights

Gradients = dict[nn.Parameter, Tensor]


@cache
def plain(pool: Pool, training: Training) -> Outcome:
    """The outcome of an ordinary Trainer without HanayoStrategy."""
    (outcome,) = pool.run(1, fit, training, Layout())
    return outcome


@cache
def by_hand(pool: Pool, training: Training, data: int = 1, num_microbatches: int = 4) -> Outcome:
    """The outcome of a hand-written loop, in a worker, so that kernels use the same number of threads."""
    (outcome,) = pool.run(1, loop, training, data, num_microbatches)
    return outcome


def loop(training: Training, data: int, num_microbatches: int) -> Outcome:
    """Train `training.steps` optimizer steps.

    Order of sums:
        ((micro-batch 0 + 1) + 2) + 3    in a batch, and on into the next one while accumulating
        data rank 0 + data rank 1        at the optimizer step
    """
    module = build(training.model, training.dtype)
    module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {parameter: name for name, parameter in module.named_parameters()}
    outcome = Outcome()
    accumulated: list[Gradients] = [{} for _ in range(data)]
    for step, steps_now, shares in _batches(training, data):
        rows = [split(batch, num_microbatches) for batch in shares]
        counts = [[_count(micro_batch, training.loss_weight) for micro_batch in row] for row in rows]
        losses = []
        for gradients, row, count in zip(accumulated, rows, counts, strict=True):
            # Weighted by samples, every data rank counts the same, as in DDP; otherwise in proportion to its weight.
            total = data * sum(count) if training.loss_weight == "samples" else sum(map(sum, counts))
            weights = [number / total / training.accumulate for number in count]
            loss = _batch(module, row, weights, gradients, mixed=training.precision == "bf16-mixed")
            losses.append(loss * training.accumulate)
        outcome.losses.append(sum(losses))
        if steps_now:
            _reduce(accumulated)
            if step == 0:
                outcome.gradients = {names[p]: p.grad.clone() for p in parameters if p.grad is not None}
            if training.clip is not None:
                nn.utils.clip_grad_norm_(parameters, training.clip)
            optimizer.step()
    outcome.weights = own_weights(module)
    return outcome


def _batches(training: Training, data: int) -> Iterator[tuple[int, bool, list[Batch]]]:
    """(optimizer step, whether it follows this batch, each data rank's batch). One follows the last batch, too."""
    shares = list(zip(*(training.share(rank, data) for rank in range(data)), strict=True))
    step = 0
    while True:
        for index, share in enumerate(shares):
            steps_now = (index + 1) % training.accumulate == 0 or index + 1 == len(shares)
            yield step, steps_now, list(share)
            step += steps_now
            if step == training.steps:
                return


def _batch(
    module: Any, micro_batches: list[Batch], weights: list[float], gradients: Gradients, *, mixed: bool = False
) -> float:
    """The weighted sum of the micro-batches' losses; their gradients are added to `gradients`."""
    for parameter in module.parameters():
        parameter.grad = gradients.get(parameter)
    total = 0.0
    for micro_batch, weight in zip(micro_batches, weights, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = module.training_step(micro_batch, 0)
        (loss * weight).backward()
        total += loss.item() * weight
    gradients.update({parameter: parameter.grad for parameter in module.parameters() if parameter.grad is not None})
    module.zero_grad(set_to_none=True)
    return total


def _reduce(accumulated: list[Gradients]) -> None:
    """Set `.grad` to the sum over data ranks, and clear the accumulated gradients."""
    for parameter, gradient in accumulated[0].items():
        for other in accumulated[1:]:
            gradient = gradient + other[parameter]
        parameter.grad = gradient
    for gradients in accumulated:
        gradients.clear()


def split(batch: Batch, num_microbatches: int) -> list[Batch]:
    """At most `num_microbatches` micro-batches, as equal as possible, the larger ones first.

    Example:
        >>> [len(micro_batch["x"]) for micro_batch in split({"x": torch.zeros(11)}, 4)]
        [3, 3, 3, 2]
    """
    size = len(next(iter(batch.values())))
    columns = {name: value.tensor_split(min(num_microbatches, size)) for name, value in batch.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _count(micro_batch: Batch, loss_weight: Any) -> float:
    if loss_weight == "samples":
        return len(next(iter(micro_batch.values())))
    if loss_weight == "tokens":
        return int((micro_batch["labels"] != IGNORED).sum())
    return loss_weight(micro_batch)
