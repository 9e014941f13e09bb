"""Which optimizers work where: on a pipeline a rank has only its own parameters, in a cube only a part of each.

an element's update depends on    the element       pipelines, cubes
                                  its parameter     pipelines; cubes, where one rank gathers each parameter
                                  all parameters    one rank

An optimizer of an unknown class is tried out (`looks_across_parameters`).
"""

import copy
import inspect
import warnings
from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn, optim
from torch.optim import LBFGS, Optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.topology import Topology

Scope = Literal["element", "parameter", "model"]
"""the tensors that an element's update depends on"""

_TORCH: dict[type[Optimizer], Scope] = {
    **dict.fromkeys((
        optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.RMSprop,
        optim.Rprop, optim.Adadelta, optim.ASGD, optim.SparseAdam,
    ), "element"),
    optim.Adafactor: "parameter",
    optim.Muon: "parameter",
}  # fmt: skip

_OTHERS: dict[str, Scope] = {
    **dict.fromkeys((
        "AdaBelief", "AdaBound", "AdEMAMix", "ADOPT", "Adan", "AdamWScheduleFree", "DeepSpeedCPUAdam", "FusedAdam",
        "FusedSGD", "Lion", "QHAdam", "RAdamScheduleFree", "SGDScheduleFree", "SophiaG", "Tiger", "Yogi",
    ), "element"),
    **dict.fromkeys((
        "Adafactor", "AdamP", "CAME", "Fromage", "FusedLAMB", "FusedNovoGrad", "GaLoreAdafactor", "GaLoreAdamW",
        "LAMB", "LARC", "LARS", "LDoG", "Lamb", "Lars", "NovoGrad", "Ranger", "SGDP", "SOAP", "Shampoo",
        "SingleDeviceMuon", "StableAdamW",
    ), "parameter"),
    **dict.fromkeys((
        "ASAM", "Adahessian", "Adai", "AdaiV2", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion",
        "DAdaptSGD", "DoG", "DoWG", "GSAM", "LookSAM", "Mechanic", "Muon", "MuonWithAuxAdam", "Prodigy",
        "ProdigyPlusScheduleFree", "Ranger21", "SAM", "SophiaH", "WSAM",
    ), "model"),
}  # fmt: skip
"""by the names of their classes: this package imports none of them; `Muon` is torch's, others communicate themselves"""

_QUANTIZED = ("bitsandbytes", "torchao")
"""packages whose states are quantized in blocks of one parameter"""
_WRAPPERS = {"Lookahead": "optimizer", "ScheduleFreeWrapper": "base"}
"""treat each element alone, around the optimizer in this attribute"""


def check_optimizers(optimizers: Sequence[Optimizer], topology: Topology, *, is_sharded: bool = False) -> None:
    """Reject optimizers that look across parameters, of which a rank has only its own; in a cube, across elements.

    Warns of an optimizer of which it isn't known, and of LBFGS on data ranks. Called by all ranks.

    Raises:
        UnsupportedError: more than one optimizer, or one that would compute with other ranks' parameters; with
            `is_sharded` also other data ranks.
    """
    if len(optimizers) > 1 and topology.replica_size > 1:
        raise UnsupportedError(
            f"configure_optimizers returns {len(optimizers)} optimizers. Lightning steps them in manual optimization "
            f"alone, which a pipeline can't run. Return one, with a param group for each set of parameters."
        )
    is_cut = is_sharded or prod(topology.cube) > 1
    for optimizer in optimizers:
        if (is_cut or topology.replica_size > 1) and optimizer.param_groups:
            _check(optimizer, _scope(optimizer), is_cut=is_cut, is_sharded=is_sharded)
        if topology.data > 1 and isinstance(optimizer, LBFGS):
            warnings.warn(
                "LBFGS decides by the loss when a step ends, and each data rank has its own: as with DDP, weights "
                "may differ from then on, or ranks wait for each other. Train on one data rank.",
                stacklevel=2,
            )


def _check(optimizer: Optimizer, scope: Scope | None, *, is_cut: bool, is_sharded: bool) -> None:
    name = type(optimizer).__name__
    if scope == "model" or (scope is None and not is_cut and looks_across_parameters(optimizer)):
        way_out = "Use one that works on each parameter alone, such as AdamW"
        if getattr(optimizer, "defaults", {}).get("max_grad_norm"):
            way_out = "Leave its max_grad_norm out, and use Trainer(gradient_clip_val=...)"
        raise UnsupportedError(
            f"{name} computes with all parameters together (one vector, a norm or a mean over them), and ranks of a "
            f"pipeline or a cube update only their own. {way_out}, or set pipeline_parallel_size=1, cube=1."
        )
    is_wrapper = name in _WRAPPERS and (is_sharded or scope != "element")
    if is_cut and (scope is None or is_wrapper):
        raise UnsupportedError(
            f"{name} isn't known to work on each element of a parameter alone, nor on each parameter, but ranks "
            "hold parts. Use AdamW or Muon, or declare on it `is_elementwise = True` or `is_parameterwise = True`."
        )
    if scope is None:
        warnings.warn(
            f"{name} isn't known to work on each parameter alone: a norm or a mean over all would be of one rank's. "
            "`hanayo check` compares some steps; if they are equal, set `is_parameterwise = True` on the optimizer.",
            stacklevel=2,
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to treat each element of a parameter alone, so that states have its shape."""
    return _scope(optimizer) == "element"


def _scope(optimizer: Optimizer) -> Scope | None:
    """The scope of an element's update, as the optimizer declares it, or as it is known; None: unknown."""
    if getattr(optimizer, "is_elementwise", False):
        return "element"
    if getattr(optimizer, "is_parameterwise", False):
        return "parameter"
    kind = type(optimizer)
    if kind.__name__ in _WRAPPERS:
        inner = getattr(optimizer, _WRAPPERS[kind.__name__], None)
        return _scope(inner) if isinstance(inner, Optimizer) else None
    if isinstance(optimizer, LBFGS) or getattr(optimizer, "defaults", {}).get("max_grad_norm"):
        return "model"
    if kind.__module__.partition(".")[0] in _QUANTIZED:
        return "parameter"
    step = inspect.unwrap(kind.step)  # torch wraps it when the first optimizer of a class is made
    inherited = (scope for one, scope in _TORCH.items() if inspect.unwrap(one.step) is step)
    return next(inherited, None) or _OTHERS.get(kind.__name__)


_NUM_STEPS = 5
_LARGEST_SIZE = 4
_SCALES = (1.0, 1e3)
"""of gradients: those that are missing the second time are much larger, so that norms over all change"""


def looks_across_parameters(optimizer: Optimizer) -> bool:
    """Whether a parameter's update depends on the others' gradients, or on how many random numbers they draw.

    A copy of the optimizer, with tiny parameters, takes a few steps with all gradients; another copy takes them with
    every other gradient missing, as those of other ranks' parameters are. If it treats each parameter alone, the
    parameters that have gradients both times go the same way.

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
    small = [torch.empty([min(size, _LARGEST_SIZE) for size in one.shape], dtype=one.dtype) for one in parameters]
    tiny = [nn.Parameter(_numbers(like, -index)) for index, like in enumerate(small)]
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


def _numbers(like: Tensor, seed: int) -> Tensor:
    """Random numbers in its shape and dtype, which don't depend on other draws."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed + 10**6)).to(like.dtype)
