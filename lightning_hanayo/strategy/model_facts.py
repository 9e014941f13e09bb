"""Reads a model for the planner: runs its training_step once on tensors without values, and counts."""

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hanayo.divisibility import Divisibility
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partition.meta_copy import MetaCopy, like
from lightning_hanayo.partition.stack import Stack, find_stack, modules_outside, num_parameters_outside
from lightning_hanayo.planner.communication_volume import LinearLayer
from lightning_hanayo.planner.model_facts import BlockFacts, ModelFacts, Product
from lightning_hanayo.runtime.batches.containers import children, with_children
from lightning_hanayo.strategy.planning.counting import Counter, Counts, fake_tensors, storages
from lightning_hanayo.tensor3d.convert.parallelize import ParallelizePlan, plan_parallelize
from lightning_hanayo.tensor3d.layers.linear import features

_MOST_REAL = 1 << 30
"""bytes of a model up to which its step runs with numbers if it can't without"""


class Formats(NamedTuple):
    """How a run stores numbers."""

    dtype: torch.dtype
    """of products"""
    parameter_bytes: int
    gradient_bytes: int
    master_bytes: int


def formats_of(precision: str, *, master_weights: bool = False) -> Formats:
    """Of a Trainer's precision, such as "bf16-mixed"."""
    halves = {"bf16": torch.bfloat16, "16": torch.float16}
    kind, _, way = str(precision).partition("-")
    if kind in halves and way == "true":
        return Formats(halves[kind], 2, 4 if master_weights else 2, 4 if master_weights else 0)
    if kind in halves:
        return Formats(halves[kind], 4, 4, 0)
    size, dtype = (8, torch.float64) if kind == "64" else (4, torch.float32)
    return Formats(dtype, size, size, 0)


def read_model(
    module: "pl.LightningModule",
    batch: Any,
    num_samples: int,
    *,
    precision: str = "32-true",
    master_weights: bool = False,
    blocks: str | None = None,
) -> ModelFacts:
    """Count what a sample takes. The module stays as it is; one that is built in `configure_model` is built on meta.

    Args:
        module: with values, or on the meta device.
        batch: of its training data.
        num_samples: of the batch.
        precision: the Trainer's.
        master_weights: whether parameters in bf16 or fp16 have master weights in fp32.
        blocks: the name of the stack; None: the largest.

    Raises:
        HanayoError: there is no stack, or the step can't run on the meta device, and the model is too large to run.
    """
    formats = formats_of(precision, master_weights=master_weights)
    own = _on_meta(module, formats.dtype)
    stack = find_stack(own, blocks)
    try:
        with fake_tensors(own) as parameters:
            counter = _count(own, stack, _converted(batch, formats.dtype, "meta"))
    except Exception as error:  # user code, which may need values
        counter, own, stack = _count_with_values(module, batch, blocks, formats.dtype, error)
        parameters = storages(list(own.parameters()))
    plan = plan_parallelize(stack.uncompiled.blocks, stack.name, (1, 1, 1), outside=_outside(own, stack))
    seen: dict[tuple[Any, ...], BlockFacts] = {}
    facts = []
    for block, counts in zip(stack.uncompiled.blocks, counter.blocks, strict=True):
        found = _block(block, counts, plan, num_samples, parameters)
        facts.append(seen.setdefault(_key(found), found))
    outside, last = counter.outside, counter.blocks[-1]
    outside_stack = set(own.parameters()) - stack.parameters
    element = formats.dtype.itemsize
    return ModelFacts(
        stack=stack.name,
        blocks=tuple(facts),
        message=last.output / num_samples,
        outside_parameters=sum(one.numel() for one in outside_stack),
        outside_frozen=_num_frozen(outside_stack),
        computing_parameters=num_parameters_outside(own, stack, computing=True),
        outside_flops=outside.flops / num_samples,
        outside_traffic=outside.traffic / num_samples,
        outside_calls=outside.calls,
        outside_saved=outside.num_saved(parameters) / num_samples,
        largest_outside=outside.largest / num_samples,
        required=_required(plan),
        tokens=_tokens(last.shape, num_samples),
        dtype=str(formats.dtype).removeprefix("torch."),
        element=element,
        parameter_bytes=formats.parameter_bytes,
        gradient_bytes=formats.gradient_bytes,
        optimizer_bytes=formats.master_bytes + _state_bytes(own, formats),
    )


def _on_meta(module: "pl.LightningModule", dtype: torch.dtype) -> "pl.LightningModule":
    """A copy without values, whose floating-point tensors have this dtype."""
    own: Any = MetaCopy(module).modules[""]
    for part in own.modules():  # a step may append to a list of the module, which the copy shares
        shared = {name: value for name, value in vars(part).items() if type(value) in (list, dict, set)}
        vars(part).update((name, value.copy()) for name, value in shared.items())
    vars(own).update(_trainer=None, _fabric=None)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own.configure_model()
    own.to(dtype)
    return own  # type: ignore[no-any-return]


def _converted(value: Any, dtype: torch.dtype, device: str) -> Any:
    """The batch with its floating-point tensors in this dtype, and all tensors on this device."""
    if isinstance(value, Tensor):
        dtype = dtype if value.is_floating_point() else value.dtype
        return torch.empty_like(value, dtype=dtype, device="meta") if device == "meta" else value.to(device, dtype)
    inside = children(value)
    if inside is None:
        return value
    return with_children(value, {key: _converted(item, dtype, device) for key, item in inside.items()})


def _count(module: "pl.LightningModule", stack: Stack, batch: Any) -> Counter:
    counter = Counter(stack.blocks)
    module.train()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), counter.watching():
        warnings.simplefilter("ignore")  # that there is no Trainer to log with
        loss = module.training_step(batch, 0)
    if loss is None or not all(one.shape for one in counter.blocks):
        raise HanayoError("the training_step returned no loss, or didn't call all blocks")
    return counter


def _count_with_values(
    module: "pl.LightningModule", batch: Any, blocks: str | None, dtype: torch.dtype, error: Exception
) -> tuple[Counter, "pl.LightningModule", Stack]:
    """The same with real numbers, in a copy of the module; any numbers, where the module itself has none."""
    name, reason = type(module).__name__, _first_line(error)
    own = _on_meta(module, dtype)
    if sum(one.nbytes for one in own.parameters()) > _MOST_REAL:
        raise HanayoError(
            f"{name}.training_step can't run on the meta device, without values ({reason}), and the model is too "
            f"large to run it with values. Make the step depend on shapes alone"
        ) from error
    tensors = _tensors(module)
    try:
        if len(tensors) == len(_tensors(own)) and not any(one.is_meta for one in tensors):
            own = copy.deepcopy(module)
            vars(own).update(_trainer=None, _fabric=None)
            own.to(dtype)
        else:
            _fill(own)
        stack = find_stack(own, blocks)
        return _count(own, stack, _converted(batch, dtype, "cpu")), own, stack
    except Exception as again:  # user code, too
        second = _first_line(again)
        others = "" if second == reason else f" (on the meta device: {reason})"
        raise HanayoError(
            f"{name}.training_step can't run by itself, without a Trainer and on a CPU: {second}{others}. A plan needs "
            f"one step; or give the sizes to HanayoStrategy instead"
        ) from again


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _fill(module: nn.Module) -> None:
    """Give the tensors small random numbers in place of none. Shared ones stay shared."""
    made: dict[Tensor, Tensor] = {}
    numbers = torch.Generator().manual_seed(0)  # its own, as the run's are needed for the training
    for part in module.modules():
        stores: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for own in stores:
            for name, tensor in own.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    values = torch.zeros_like(tensor, device="cpu")
                    values = values.uniform_(-0.02, 0.02, generator=numbers) if values.is_floating_point() else values
                    made[tensor] = like(tensor, values)
                own[name] = made[tensor]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


def _outside(module: nn.Module, stack: Stack) -> set[nn.Parameter]:
    return {one for part in modules_outside(module, stack) for one in part.parameters(recurse=False)}


def _block(
    block: nn.Module, counts: Counts, plan: ParallelizePlan, num_samples: int, parameters: set[int]
) -> BlockFacts:
    """The facts of one block."""
    products = sorted(plan.products(block), key=lambda one: _position(counts, one[0]))
    found = [_product(block, paths, counts, num_samples, is_row, plan) for paths, is_row in products]
    own = tuple(one for one in found if one is not None)
    linear = sum(one.flops for one in own)
    return BlockFacts(
        products=own,
        parameters=sum(one.numel() for one in block.parameters()),
        attention_flops=max(0.0, counts.flops / num_samples - linear),
        traffic=counts.traffic / num_samples,
        calls=counts.calls,
        saved=counts.num_saved(parameters) / num_samples,
        frozen=_num_frozen(block.parameters()),
    )


def _num_frozen(parameters: Iterable[nn.Parameter]) -> int:
    return sum(one.numel() for one in parameters if not one.requires_grad)


def _position(counts: Counts, paths: tuple[str, ...]) -> int:
    called = list(counts.tokens)
    return min((called.index(path) for path in paths if path in counts.tokens), default=len(called))


def _product(
    block: nn.Module, paths: tuple[str, ...], counts: Counts, num_samples: int, is_row: bool, plan: ParallelizePlan
) -> Product | None:
    """The product of these layers; None if the step doesn't call them."""
    if not (rows := max(counts.tokens.get(path, 0) for path in paths)):
        return None
    sizes = [features(block.get_submodule(path)) for path in paths]
    layer = LinearLayer(max(1, rows // num_samples), sizes[0][1], sum(out for out, _ in sizes), is_row)
    return Product(layer, is_generic=not plan.is_registered)


def _key(facts: BlockFacts) -> tuple[Any, ...]:
    return facts.products, facts.parameters, facts.frozen, round(facts.flops), round(facts.traffic), round(facts.saved)


def _required(plan: ParallelizePlan) -> tuple[Divisibility, ...]:
    """Each size once."""
    sizes: dict[tuple[Any, ...], Divisibility] = {}
    for one in plan.divisibility():
        sizes.setdefault((one.what, one.size, one.axes), one)
    return tuple(sizes.values())


def _tokens(shape: tuple[int, ...], num_samples: int) -> int:
    """What a sample has of all dimensions but the features."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return max(1, rows // num_samples)


def _state_bytes(module: "pl.LightningModule", formats: Formats) -> float:
    """Bytes of the optimizer's states for each parameter, by a step with a tiny one; 0 without an optimizer.

    Where that can't be known without a Trainer, as many as Adam has.
    """
    element = 4 if formats.master_bytes else formats.parameter_bytes
    try:
        optimizer = _optimizer(module)
    except Exception:  # user code, which may need a Trainer
        return 2.0 * element
    if optimizer is None:
        return 0.0
    tiny = nn.Parameter(torch.zeros(4, 4))
    tiny.grad = torch.ones(4, 4)
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.param_groups[0].items() if name in known and name != "params"}
    try:
        same: Any = type(optimizer)([tiny], **options)
        same.step()
    except Exception:  # one of the user's own
        return 2.0 * element
    states = [one for state in same.state.values() for one in state.values() if isinstance(one, Tensor)]
    return element * sum(one.numel() for one in states if one.dim()) / tiny.numel()


def _optimizer(module: "pl.LightningModule") -> Optimizer | None:
    """The first that the module configures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = module.configure_optimizers()
    while found is not None and not isinstance(found, Optimizer):
        found = found.get("optimizer") if isinstance(found, Mapping) else found[0] if found else None
    return found
