"""Reads a model for the planner: runs its training_step once on tensors without values, and counts.

Counts what a forward computes, reads, writes and keeps, by block, while it runs; tensors need no values.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_hanayo.chunked_loss.cross_entropy import CHUNK, chunk_losses, has_causal_models, is_in_loss
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.linear_modules import as_autocast, is_linear
from lightning_hanayo.partition.stack import Stack, find_stack, is_ambiguous, modules_outside, num_parameters_outside
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchSource
from lightning_hanayo.planner.communication_volume import ExpertLayer, LinearLayer
from lightning_hanayo.planner.machine import DTYPES
from lightning_hanayo.planner.model_facts import BlockFacts, Code, ModelFacts
from lightning_hanayo.strategy.batch_split import BatchSplitter
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.uncut_step import on_copy, recorded_calls, run_step
from lightning_hanayo.tensor_parallel.convert.parallelize import ParallelizePlan, plan_parallelize
from lightning_hanayo.tensor_parallel.layers.experts import is_fused_experts
from lightning_hanayo.tensor_parallel.layers.linear import features
from lightning_hanayo.tensor_parallel.outside_parameters import vocabulary_weights

VIEWS = (
    "detach", "view", "_unsafe_view", "alias", "t", "transpose", "unsqueeze", "squeeze", "select", "slice", "split",
    "expand", "permute", "empty", "device",
)  # fmt: skip
"""operations that start no kernel, and cost the host little compared with those that do"""
GROUPED_FUNCTIONS = "_grouped_mm", "grouped_mm"
"""of torch, by which transformers computes products of each expert's tokens with its own weight"""
GROUPED = ("_grouped_mm", "grouped_mm_fallback")
"""products of each expert's tokens with its own weight, by torch and by transformers; torch's counter lacks them"""

_SAME_FLOPS = {"_scaled_dot_product_flash_attention_for_cpu": torch.ops.aten._scaled_dot_product_flash_attention}
"""operations that torch's counter lacks, and others that compute the same"""


@dataclass
class Counts:
    """Of one block, or of all code outside the stack."""

    flops: float = 0.0
    traffic: float = 0.0
    """bytes that operations other than products read and write"""
    calls: int = 0
    saved: dict[int, int] = field(default_factory=dict)
    """bytes by storage of what autograd keeps"""
    largest: int = 0
    """bytes of the largest tensor that is made"""
    tokens: dict[str, int] = field(default_factory=dict)
    """rows of the input of each linear layer, by its path in the block"""
    output: int = 0
    """bytes that the block hands on"""
    shape: tuple[int, ...] = ()
    """of the largest tensor that it hands on"""
    experts: ExpertLayer | None = None
    """the sizes of experts that a cube's ranks can share, for all samples"""
    of_experts: "Counts | None" = None
    """their part of flops and saved"""
    dtype: str = ""
    """of the last product"""

    def num_saved(self, without: set[int]) -> int:
        """Bytes that autograd keeps, without these storages."""
        return sum(size for storage, size in self.saved.items() if storage not in without)

    def code(self, num_samples: int, parameters: set[int], of_stack: int) -> Code:
        """For one sample, without the storages of parameters. A norm's backward holds four of the stack's outputs."""
        saved, workspace = self.num_saved(parameters), max(2 * self.largest, 4 * of_stack)  # a tensor and its gradient
        return replace(Code(self.flops, self.traffic, 0, saved, workspace) * (1 / num_samples), calls=self.calls)


class Counter(TorchDispatchMode):
    """Counts while it is active, for the block that runs.

    Args:
        blocks: of the stack.
        parameters: numbers of the storages of parameters, to which those of copies in another format are added.
    """

    def __init__(self, blocks: Sequence[nn.Module], parameters: set[int]) -> None:
        super().__init__()
        self.outside, self.loss = Counts(), Counts()
        self.logits = self.head = 0
        """elements of a whole chunk's logits, and of the weight that they are made with"""
        self.blocks = [Counts() for _ in blocks]
        self._modules = blocks
        self._now = self.outside
        self._experts: Counts | None = None
        self._keeps: list[Tensor] = []
        self._parameters = parameters

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count a forward in this context."""
        with ExitStack() as hooks:
            for block, counts in zip(self._modules, self.blocks, strict=True):
                self._watch(hooks, block, counts)
            hooks.enter_context(saved_tensors_hooks(self._keep, lambda tensor: tensor))
            hooks.enter_context(_FlashAttention())
            hooks.enter_context(self)
            yield

    def _watch(self, hooks: ExitStack, block: nn.Module, counts: Counts) -> None:
        def begin(*_: Any) -> None:
            self._now = counts

        def end(_: nn.Module, __: Any, output: Any) -> None:
            tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
            counts.output = sum(one.nbytes for one in tensors)
            counts.shape = tuple(max(tensors, key=Tensor.numel).shape) if tensors else ()
            self._now = self.outside

        def count_rows(path: str, _: nn.Module, inputs: Any, __: Any) -> None:
            x = inputs[0]
            counts.tokens[path] = counts.tokens.get(path, 0) + x.numel() // x.shape[-1]

        def begin_experts(module: nn.Module, args: Any, kwargs: Any) -> None:
            x, index, *_ = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            parameters = sum(one.numel() for one in module._parameters.values() if one is not None)
            number: Any = module.num_experts
            counts.experts = ExpertLayer(len(x), x.shape[-1], number, index.shape[-1], parameters)
            counts.of_experts = self._experts = Counts()

        def end_experts(*_: Any) -> None:
            self._experts = None

        hooks.callback(block.register_forward_pre_hook(begin).remove)
        hooks.callback(block.register_forward_hook(end).remove)
        for path, module in block.named_modules():
            if is_linear(module):
                hooks.callback(module.register_forward_hook(partial(count_rows, path)).remove)
            elif is_fused_experts(module):
                hooks.callback(module.register_forward_pre_hook(begin_experts, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(end_experts).remove)

    def _keep(self, tensor: Tensor) -> Tensor:
        self._keeps.append(tensor)  # so that no other storage gets its number
        storage = tensor.untyped_storage()
        for counts in filter(None, (self._now, self._experts)):
            counts.saved[storage._cdata] = storage.nbytes()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        now = self.loss if is_in_loss.get() else self._now
        name = _SAME_FLOPS.get(func._opname, func._overloadpacket)
        if func._opname == "_to_copy" and args[0].untyped_storage()._cdata in self._parameters:  # by autocast
            self._parameters.add(result.untyped_storage()._cdata)
            self._keeps.append(result)
        if func._opname in VIEWS:
            return result
        now.calls += 1
        now.largest = max([now.largest, *(one.nbytes for one in tree_leaves(result) if isinstance(one, Tensor))])
        if name in flop_registry or func._opname in GROUPED:
            if name in flop_registry:
                flops = float(flop_registry[name](*args, **kwargs, out_val=result))
            else:
                flops = 2.0 * result.numel() * args[0].shape[-1]
            if now is self.loss:
                rows, words = result.shape
                rows = rows if self.head else max(rows, CHUNK)  # of the first chunk, which may be the only one
                self.logits, self.head = max(self.logits, rows * words), args[-1].numel()
            for counts in filter(None, (now, self._experts)):
                counts.flops += flops
                counts.dtype = str(args[0].dtype).removeprefix("torch.")
        else:
            tensors = tree_leaves((args, kwargs, result))
            now.traffic += sum(one.nbytes for one in tensors if isinstance(one, Tensor))
        return result


class _FlashAttention(TorchFunctionMode):
    """Has attention on the meta device do what it does on devices, where no matrix of all pairs of tokens is kept.

    Elsewhere, too, each head of queries gets keys of its own: torch 2.10 counts no operations of groups. Products of
    experts in fp32, which torch doesn't run without values, become one product of all tokens with one expert's weight:
    it computes and keeps as much.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_fake = bool(args) and isinstance(args[0], FakeTensor)
        if is_fake and getattr(func, "__name__", "") in GROUPED_FUNCTIONS and args[0].dtype is not torch.bfloat16:
            with torch.autocast("cpu", enabled=False):  # torch groups no products of fp32 without values
                return args[0].mm(args[1][0])
        if func is not F.scaled_dot_product_attention or len(args) < 3:
            return func(*args, **kwargs)
        q, k, v = map(as_autocast, args[:3])  # [batch, heads, tokens, features] each
        if q.dim() == 4 and (groups := q.shape[1] // k.shape[1]) > 1:
            k, v = (one.repeat_interleave(groups, 1) for one in (k, v))
        if not isinstance(q, FakeTensor) and not q.is_meta:
            return func(q, k, v, *args[3:], **kwargs)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]


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


def read_batch(model: "pl.LightningModule", batch: Any, options: Options, precision: Any) -> tuple[ModelFacts, int]:
    """What a run with these options computes for a batch, as `read_model` counts it, and the samples of the batch.

    Raises:
        HanayoError: the samples can't be counted.
    """
    num_samples = BatchSplitter(options.batch_rule).num_samples(batch, BatchSource(module=model))
    if not num_samples:
        reason = "the samples of a training batch can't be counted, which a plan needs"
        raise HanayoError(f"{reason}: let the loader give tensors, or give the sizes to HanayoStrategy instead")
    has_masters, blocks = options.master_weights is not None, options.stack
    facts = read_model(model, batch, num_samples, precision=precision, master_weights=has_masters, blocks=blocks)
    return facts, num_samples


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
        blocks: the name of the stack; None: the largest that the step passes through.

    Raises:
        HanayoError: there is no stack, or the step can't run on the meta device, and the model is too large to run.
    """
    formats = formats_of(precision, master_weights=master_weights)

    def count(own: "pl.LightningModule", batch: Any, parameters: set[int]) -> Any:
        calls = recorded_calls(own, batch) if blocks is None and is_ambiguous(own) else None
        stack = find_stack(own, blocks, calls)
        counter = in_chunks = _count(own, stack, batch, parameters)
        if not counter.head and has_causal_models(own):  # `cube_outside="tokens"` computes its loss in chunks
            chunk_losses(own, object.__setattr__)
            in_chunks = _count(own, stack, batch, parameters)
        return own, stack, parameters, counter, in_chunks

    is_mixed = precision.endswith("-mixed")
    dtype, autocast = (torch.float32, formats.dtype) if is_mixed else (formats.dtype, None)
    own, stack, parameters, counter, in_chunks = on_copy(module, batch, dtype, count, autocast)
    beside = {one for part in modules_outside(own, stack) for one in part.parameters(recurse=False)}
    plan = plan_parallelize(stack.uncompiled.blocks, stack.name, (1, 1, 1), outside=beside)
    seen: dict[tuple[Any, ...], BlockFacts] = {}
    facts = []
    for block, counts in zip(stack.uncompiled.blocks, counter.blocks, strict=True):
        found = _block(block, counts, plan, num_samples, parameters, formats.dtype.itemsize if is_mixed else 0)
        sizes = found.products, found.parameters, found.frozen
        facts.append(seen.setdefault((*sizes, *map(round, (found.flops, found.traffic, found.saved))), found))
    last = counter.blocks[-1]
    outside_stack = set(own.parameters()) - stack.parameters
    element = formats.dtype.itemsize
    vocabulary = vocabulary_weights(modules_outside(own, stack))

    def code(counter: Counter, *, by_rows: bool) -> tuple[Code, Code]:
        outside, loss = (one.code(num_samples, parameters, last.output) for one in (counter.outside, counter.loss))
        copy = element * is_mixed * counter.head  # autocast's, which autograd keeps unless rows are shared
        sums = (max(4, element) + element) * (counter.logits + counter.head)  # logits and dweight, and in low precision
        return outside, replace(loss, saved=copy * (not by_rows), workspace=sums + copy * by_rows)

    outside, loss = code(counter, by_rows=False)
    return ModelFacts(
        stack=stack.name,
        blocks=tuple(facts),
        message=last.output / num_samples,
        outside_parameters=sum(one.numel() for one in outside_stack),
        outside_frozen=_num_frozen(outside_stack),
        computing_parameters=num_parameters_outside(own, stack, computing=True),
        outside=outside,
        loss=loss,
        by_rows=code(in_chunks, by_rows=True) if in_chunks.head and vocabulary else None,
        vocabulary_bytes=formats.parameter_bytes * sum(one.numel() for one in vocabulary),
        vocabulary_gradients=formats.gradient_bytes * sum(one.requires_grad * one.numel() for one in vocabulary),
        required=tuple({(one.what, one.size, one.axes): one for one in plan.divisibility()}.values()),
        tokens=max(1, prod(last.shape[:-1]) // num_samples),
        dtype=str(formats.dtype).removeprefix("torch."),
        element=element,
        parameter_bytes=formats.parameter_bytes,
        gradient_bytes=formats.gradient_bytes,
        optimizer_bytes=formats.master_bytes + _state_bytes(own, formats),
    )


def _count(module: "pl.LightningModule", stack: Stack, batch: Any, parameters: set[int]) -> Counter:
    counter = Counter(stack.blocks, parameters)
    with counter.watching():
        loss = run_step(module, batch)
    if loss is None or not all(one.shape for one in counter.blocks):
        raise HanayoError("the training_step returned no loss, or didn't call all blocks")
    return counter


def _block(
    block: nn.Module, counts: Counts, plan: ParallelizePlan, num_samples: int, parameters: set[int], cast: int
) -> BlockFacts:
    """The facts of one block. `cast`: bytes of a number in autocast's format; 0 without autocast."""
    called = list(counts.tokens)

    def position(paths: Sequence[str]) -> int:
        return min((called.index(path) for path in paths if path in counts.tokens), default=len(called))

    products = sorted(plan.products(block), key=lambda one: position(one[0]))
    own, repeated = [], 0
    for paths, is_row in products:
        if rows := max(counts.tokens.get(path, 0) for path in paths):  # else the step doesn't call them
            sizes = [features(block.get_submodule(path)) for path in paths]
            tokens, width = max(1, rows // num_samples), sum(out for out, _ in sizes)
            own.append(LinearLayer(tokens, sizes[0][1], width, is_row, is_generic=not plan.is_registered))
            repeated += (len(paths) - 1) * own[-1].sizes[0]
    experts, of_experts = counts.experts, counts.of_experts
    if experts is not None and of_experts is not None:
        tokens, saved = experts.tokens // num_samples, of_experts.num_saved(parameters) / num_samples
        flops, dtype = of_experts.flops / num_samples, of_experts.dtype if of_experts.dtype in DTYPES else ""
        experts = replace(experts, tokens=tokens, flops=flops, saved=saved, dtype=dtype)
    return BlockFacts(
        products=tuple(own),
        parameters=sum(one.numel() for one in block.parameters()),
        attention_flops=max(0.0, counts.flops / num_samples - sum(one.flops for one in own)),
        traffic=counts.traffic / num_samples,
        calls=counts.calls,
        saved=counts.num_saved(parameters) / num_samples,
        repeated_inputs=cast * repeated,
        frozen=_num_frozen(block.parameters()),
        experts=experts,
    )


def _num_frozen(parameters: Iterable[nn.Parameter]) -> int:
    return sum(one.numel() for one in parameters if not one.requires_grad)


def _state_bytes(module: "pl.LightningModule", formats: Formats) -> float:
    """Bytes of the optimizer's states for each parameter, by a step with a tiny one; 0 without an optimizer.

    The first that the module configures counts. Where that can't be known, as many as Adam has.
    """
    element = 4 if formats.master_bytes else formats.parameter_bytes
    tiny = nn.Parameter(torch.zeros(4, 4))
    tiny.grad = torch.ones(4, 4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Any = module.configure_optimizers()
        while found is not None and not isinstance(found, Optimizer):
            found = found.get("optimizer") if isinstance(found, Mapping) else found[0] if found else None
        if found is None:
            return 0.0
        known = inspect.signature(type(found)).parameters
        options = {name: value for name, value in found.param_groups[0].items() if name in known and name != "params"}
        same: Any = type(found)([tiny], **options)
        same.step()
    except Exception:  # user code, which may need a Trainer; or an optimizer of the user's own
        return 2.0 * element
    states = [one for state in same.state.values() for one in state.values() if isinstance(one, Tensor)]
    return element * sum(one.numel() for one in states if one.dim()) / tiny.numel()
