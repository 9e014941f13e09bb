"""Tries out whether an optimizer of an unknown class looks across parameters, as on a pipeline none may.

A copy of it, with tiny parameters, takes a few steps with all gradients; another copy takes them with every other
gradient missing, as those of other ranks' parameters are. If it treats each parameter alone, the parameters that have
gradients both times go the same way.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_NUM_STEPS = 5
_LARGEST_SIZE = 4
_SCALES = (1.0, 1e3)
"""of gradients: those that are missing the second time are much larger, so that norms over all change"""


def looks_across_parameters(optimizer: Optimizer) -> bool:
    """Whether a parameter's update depends on the others' gradients, or on how many random numbers they draw.

    False if the optimizer can't be tried out, or has one parameter only.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            whole, part = _results(optimizer, missing=False), _results(optimizer, missing=True)
    except Exception:  # user code, on parameters of a form that it doesn't expect
        return False
    pairs = zip(whole[::2], part[::2], strict=True)
    return not all(torch.allclose(one, other, rtol=1e-4, atol=1e-9, equal_nan=True) for one, other in pairs)


def _results(optimizer: Optimizer, *, missing: bool) -> list[Tensor]:
    """The values of the tiny parameters after some steps."""
    torch.default_generator.manual_seed(0)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tiny = [_tiny(parameter, index) for index, parameter in enumerate(parameters)]
    copied = _copy(optimizer, parameters, tiny)
    for step in range(_NUM_STEPS):
        for index, parameter in enumerate(tiny):
            is_missing = missing and index % 2 == 1
            parameter.grad = None if is_missing else _SCALES[index % 2] * _numbers(parameter, step + index + 1)
        copied.step()
    return [parameter.detach() for parameter in tiny]


def _copy(optimizer: Optimizer, parameters: Sequence[Tensor], tiny: Sequence[nn.Parameter]) -> Optimizer:
    """The optimizer with other parameters, without hooks; a scheduler's `step` would step the original."""
    memo: dict[int, object] = {id(parameter): small for parameter, small in zip(parameters, tiny, strict=True)}
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step" and "hook" not in name}
    copied = copy.copy(optimizer)
    vars(copied).clear()
    copied.__setstate__(copy.deepcopy(attributes, memo))
    return copied


def _tiny(parameter: Tensor, index: int) -> nn.Parameter:
    shape = [min(size, _LARGEST_SIZE) for size in parameter.shape]
    return nn.Parameter(_numbers(torch.empty(shape, dtype=parameter.dtype), -index))


def _numbers(like: Tensor, seed: int) -> Tensor:
    """Random numbers in its shape and dtype, which don't depend on other draws."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed + 10**6)).to(like.dtype)
