"""Gradients that a hook removes, by what it finds on one rank, are removed on all ranks, or it is an error.

rank 0 of a cube finds a NaN in its shard    p.grad = None    --+-- removed on both: they hold shards of one gradient
rank 1 of a cube finds none in its own       p.grad is kept   --+

pipeline rank 0 finds a NaN                  zero_grad()      --+-- an error: it may be meant for these parameters alone
pipeline rank 1 finds none                   grads are kept   --+
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.lightning.user_hooks import is_listened_to
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

_HOOKS = ("on_after_backward", "on_before_optimizer_step")
"""where users look at gradients and remove them; the module's own hook runs after those of the callbacks"""


def agree_after_hooks(trainer: "pl.Trainer", module: "pl.LightningModule", attributes: TemporaryAttributes) -> None:
    """Let the ranks agree after each hook that is defined, until `attributes` are restored."""
    for name in _HOOKS:
        if is_listened_to(trainer, name):
            attributes.set(module, name, partial(_hook, module, name, vars(module).get(name)))


def agree_in_cube(parameters: Sequence[nn.Parameter], cube: dist.ProcessGroup) -> None:
    """Remove the gradients that a rank of the cube lacks. Called by all of its ranks, with the same parameters."""
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    dist.all_reduce(present, dist.ReduceOp.MIN, group=cube)
    for parameter, is_present in zip(parameters, present.tolist(), strict=True):
        if not is_present:
            parameter.grad = None


def check_alike(hook: str, *, had_gradients: bool, has_gradients: bool, replica: dist.ProcessGroup) -> None:
    """Check that a hook has removed all gradients on all ranks or on none. Called by all that train one copy.

    Raises:
        UnsupportedError: it has done so on some ranks only.
    """
    removed = had_gradients and not has_gradients
    counts = torch.tensor([int(had_gradients), int(removed)])
    dist.all_reduce(counts, group=replica)
    num_had, num_removed = counts.tolist()
    if 0 < num_removed < num_had:
        raise UnsupportedError(
            f"{hook} has {'removed' if removed else 'kept'} all gradients on rank {dist.get_rank()}, but not on all "
            f"ranks, which hold different parameters. Decide by a value of the whole model, such as get_total_norm of "
            f"all gradients, or in optimizer_step, where the ranks agree. If these parameters alone are meant, zero "
            f"their gradients, or set requires_grad = False."
        )


def _hook(module: "pl.LightningModule", name: str, instance_hook: Callable[..., Any] | None, *args: Any) -> None:
    """Takes the place of the module's hook. It holds nothing of the run, so that the module can be copied."""
    hook = instance_hook or partial(getattr(type(module), name), module)
    session: Any = module.trainer.strategy.session  # type: ignore[attr-defined]
    with session.agreeing_on_gradients(name):
        hook(*args)
