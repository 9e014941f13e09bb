"""Clips gradients by the norm of the whole model, bit for bit as one process does it.

One process takes the norm of each parameter's gradient, then the norm of these norms. So the ranks of a pipeline
exchange the norms of their own parameters (adding the others' zeros is exact), and all compute the second step alike.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def clip_by_norm(
    parameters: Sequence[Tensor], max_norm: float, group: dist.ProcessGroup | None, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients of `parameters` so that their norm over the pipeline is at most `max_norm`; return the norm.

    Called by all ranks of the pipeline with the same parameters in the same order; other ranks' are placeholders.

    Args:
        parameters: the optimizer's.
        max_norm: in units of the gradients.
        group: the ranks of the pipeline, for CPU tensors; None if there is one.
        norm_type: the p of the norm.
    """
    if group is None:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    owned = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = torch.stack(torch._foreach_norm(gradients, norm_type)) if gradients else torch.zeros(0)
    norms = torch.zeros(2, len(parameters), dtype=torch.float64)  # the norms, and whether there is a gradient
    norms[0, owned] = own.to("cpu", torch.float64)
    norms[1, owned] = 1.0
    dist.all_reduce(norms, group=group)
    total: Tensor = torch.linalg.vector_norm(norms[0, norms[1] > 0].to(own.dtype), norm_type)
    if gradients:
        total = total.to(gradients[0].device)
        nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], max_norm, total)
    return total


def clip_by_norm_of_shards(
    parameters: Sequence[Tensor],
    max_norm: float,
    group: dist.ProcessGroup,
    num_replicas: Callable[[Tensor], int],
    norm_type: float = 2.0,
) -> Tensor:
    """Clip where each rank of a cube holds shards of the parameters; return the norm.

    Called by all ranks of the pipeline and its cubes.

    Args:
        parameters: the optimizer's; those of other pipeline ranks are placeholders.
        max_norm: in units of the gradients.
        group: these ranks, for CPU tensors.
        num_replicas: how many ranks hold the same shard of a parameter.
        norm_type: the p of the norm, finite.
    """
    own = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    power = torch.zeros((), dtype=torch.float64)
    if gradients:
        norms = torch.stack(torch._foreach_norm(gradients, norm_type)).to("cpu", torch.float64)
        counts = torch.tensor([num_replicas(parameter) for parameter in own], dtype=torch.float64)
        power = (norms**norm_type / counts).sum()
    dist.all_reduce(power, group=group)
    total: Tensor = power ** (1 / norm_type)
    if gradients:
        total = total.to(gradients[0].device, gradients[0].dtype)
        nn.utils.clip_grads_with_norm_(own, max_norm, total)
    return total
