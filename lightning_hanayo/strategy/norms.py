"""Norms of the whole model's gradients, of which each rank holds its own, or its shards of them.

One process takes the norm of each parameter's gradient, then the norm of these norms. So the ranks exchange the norms
of their own parameters, and all compute the second step alike. On pipelines both steps are torch's, bit for bit: adding
the zeros of the ranks that don't own a parameter is exact.

index in the module    0   1   2   3   4        parameter 4 has no gradient anywhere
rank 0                n0   .   .  n3   .        all-reduce ->  n0 n1 n2 n3  ->  norm, on every rank
rank 1                 .  n1  n2   .   .

The norms stay on the device. Which rank has which gradients, and in which order, is exchanged over gloo.

For the time of a run, torch's and Lightning's functions for norms and clipping are patched to see the whole model.
Parameters that belong to no run are treated as always.

clip_grad_norm_(parameters)  ->  of a running module?  yes: GradientNorms, over all ranks
                                                       no:  torch's own code
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial, reduce
from math import inf, isinf
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lightning_hanayo.dist_checkpointing.load_state import Sharding
from lightning_hanayo.errors import UnsupportedError, available
from lightning_hanayo.partial_values import PartialValues, plain_alias
from lightning_hanayo.pipeline_parallel.transport import Relay
from lightning_hanayo.strategy.optimizer_shards import OptimizerShards
from lightning_hanayo.strategy.patches import PatchedFunction, PatchedInRuns
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.topology import AXES
from lightning_hanayo.weight_gradients import gradient_dtype


@dataclass(frozen=True)
class OwnGradient:
    """A gradient that this rank holds: its parameter's index in the module, and its place among the user's arguments.

    The place decides the order in which norms are added; where users pass placeholders, too, it is that of one process.
    """

    index: int
    place: int
    value: Tensor


@dataclass(eq=False, repr=False)
class GradientNorms:
    """Norms over the parameters of one module. Its methods are called by all ranks that train one copy of it."""

    parameters: InitVar[Sequence[nn.Parameter]]
    """the module's, in its order, which is the same on all ranks; other ranks' are placeholders"""
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None
    """the ranks that train one copy of the module, for tensors in host memory, and for those of the device; None if
    there is one rank"""
    device: torch.device
    """of this rank's gradients"""
    num_replicas: Callable[[Tensor], int] | None = None
    """on how many ranks of the groups the same part of a parameter's gradient is taken; None: on one"""
    own_part: Callable[[Tensor, Tensor], Tensor] = lambda _, value: value
    """returns this rank's part of the gradient of a parameter"""
    relay: Relay | None = None
    """over the group's ranks; announces each call, so that one on some ranks only is an error, not a deadlock"""
    unguarded: Callable[[], AbstractContextManager[None]] = nullcontext
    """entered while code runs that knows of parts and placeholders"""

    def __post_init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.watch(parameters)
        self.in_batch = False
        self.total_of_all: Tensor | None = None
        """the last norm, since `forget_total`, if it was over all gradients: finite if all of them are"""
        self._was_of_all = False

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take norms of these parameters from now on."""
        self._parameters = list(parameters)
        self._indices: dict[Tensor, int] = {parameter: i for i, parameter in enumerate(self._parameters)}
        self._places: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        """on the device, by the indices of parameters: the same, and on how many ranks of a cube each shard is"""
        self._first_norms: dict[int, Tensor] = {}
        """of each parameter in a norm, since `forget_total`"""

    def parameters_among(self, passed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The module's parameters, on whichever rank, and the others."""
        parameters = self.without_guards(passed)
        return parameters, [parameter for parameter in parameters if parameter not in self._indices]

    def without_guards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parameters themselves, or plain tensors, where user code was given guarded aliases."""
        if not any(isinstance(tensor, PartialValues) for tensor in tensors):
            return list(tensors)
        own = {_memory_of(parameter): parameter for parameter in self._parameters if not parameter.is_meta}
        return [own.get(_memory_of(t), plain_alias(t)) if isinstance(t, PartialValues) else t for t in tensors]

    def close(self) -> None:
        """Forget the other ranks: the run has ended."""
        self.groups = self.relay = None

    @staticmethod
    def of_run(run: Run, cube: Sharding | None, shards: OptimizerShards | None) -> "GradientNorms":
        """Norms over the whole model's gradients, which torch's functions for norms and clipping take from now on."""
        several, scatters = run.topology.replica_size > 1, shards is not None and shards.scatters
        groups = (run.groups.replica, run.groups.replica_tensors) if several else None
        parts: dict[str, Any] = {"num_replicas": None if cube is None else cube.num_replicas}
        if shards is not None and scatters:
            world = run.groups.factory.control(run.topology.groups(*AXES))
            groups = world, available(dist.group.WORLD, "several ranks")
            parts = {"num_replicas": shards.num_replicas, "own_part": shards.own_rows}
        relay, parameters = run.replica_relay, list(run.module.parameters())
        made = GradientNorms(parameters, groups, run.device, relay=relay, unguarded=run.guard.off, **parts)
        if several or scatters:
            PATCHES.start(made)
            run.parts.add(lambda: PATCHES.stop(made))
        run.parts.add(made.close)
        return made

    @contextmanager
    def batch(self) -> Iterator[None]:
        """While a batch runs, gradients are incomplete, and user code runs on some ranks only."""
        self.in_batch = True
        try:
            yield
        finally:
            self.in_batch = False

    def check_outside_batch(self, function: str) -> None:
        """Check that no batch is running.

        Raises:
            UnsupportedError: one is, so that only some ranks call the function.
        """
        if self.in_batch:
            raise UnsupportedError(
                f"{function} was called on the module's parameters in a step or in a block, before gradients are "
                "complete. Call it in on_before_optimizer_step or configure_gradient_clipping."
            )

    def gradients_of(self, parameters: Sequence[Tensor]) -> list[OwnGradient]:
        """The gradients that this rank holds of some of the module's parameters."""
        return [
            OwnGradient(self._indices[parameter], place, self.own_part(parameter, parameter.grad))
            for place, parameter in enumerate(parameters)
            if not parameter.is_meta and parameter.grad is not None
        ]

    def gradients_among(self, passed: Sequence[Tensor]) -> tuple[list[OwnGradient], list[Tensor]]:
        """This rank's gradients, or values of parameters, and the others. Those on meta stand for other ranks'."""
        own = [(i, p) for i, p in enumerate(self._parameters) if not p.is_meta and p.numel()]
        by_memory = {_memory_of(p): i for i, p in own}
        by_memory |= {_memory_of(p.grad): i for i, p in own if p.grad is not None}
        found, others = list[OwnGradient](), list[Tensor]()
        for place, tensor in enumerate(self.without_guards(passed)):
            index = self._indices.get(tensor, by_memory.get(_memory_of(tensor)))
            if index is not None and not tensor.is_meta:
                found.append(OwnGradient(index, place, self.own_part(self._parameters[index], tensor.detach())))
            elif not tensor.is_meta and tensor.numel():
                others.append(tensor)
        return found, others

    def total(self, gradients: Sequence[OwnGradient], norm_type: float, *, foreach: bool | None = None) -> Tensor:
        """The norm over all ranks' gradients; 0 if there are none. The ranks pass their own of one set."""
        norms = self.each(gradients, norm_type, foreach=foreach)
        if not norms:
            return torch.zeros((), device=self.device)
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm for _, norm in norms]), norm_type)
        if norm_type > 0:
            self._first_norms = dict(norms) | self._first_norms
        if self._was_of_all and norm_type > 0:
            self.note_total(total)
        return total

    def note_total(self, total: Tensor) -> None:
        """Called with a norm over all gradients of this rank's optimizer."""
        self.total_of_all = total.detach()

    def forget_total(self) -> None:
        """Called before gradients are clipped."""
        self.total_of_all, self._first_norms = None, {}

    def nonfinite_of_totals(self) -> list[nn.Parameter]:
        """The parameters of any rank whose gradient wasn't finite when a norm was made, since `forget_total`.

        The host waits.
        """
        return [self._parameters[i] for i, norm in self._first_norms.items() if not norm.isfinite()]

    def by_parameter(self, gradients: Sequence[OwnGradient], norm_type: float) -> Mapping[Tensor, Tensor]:
        """The norm of each parameter that has a gradient on some rank, other ranks' placeholders included."""
        norms = self.each(gradients, norm_type)
        return {self._parameters[i]: norm.to(gradient_dtype(self._parameters[i])) for i, norm in norms}

    def each(
        self, gradients: Sequence[OwnGradient], norm_type: float, *, foreach: bool | None = None
    ) -> list[tuple[int, Tensor]]:
        """The index and the norm of each gradient, in the user's order; on the device, in one dtype."""
        if self.relay is not None:
            self.relay.broadcast("norm")
        first = {gradient.index: gradient for gradient in reversed(gradients) if gradient.value.numel()}
        table = self._table(gradients, first)
        if self.groups is not None:
            dist.all_reduce(table, group=self.groups[0])
        present, counts, places, existing = table.tolist()
        self._was_of_all = all(ranks for ranks, exist in zip(present, existing, strict=True) if exist)
        found = sorted((i for i, ranks in enumerate(present) if ranks), key=lambda i: (places[i] / present[i], i))
        if not found:
            return []
        dtype = reduce(torch.promote_types, {gradient_dtype(self._parameters[i]) for i in found})
        norms = self._exchange(self._own_norms(first, norm_type, foreach), norm_type).to(dtype).unbind()
        return [(i, norms[i]) for i in found for _ in range(counts[i] // present[i])]

    def _table(self, gradients: Sequence[OwnGradient], first: Mapping[int, OwnGradient]) -> Tensor:
        """[4, parameters], in host memory: 1 for those that are here; how often, and where they were passed.

        Last 1 for all that have a gradient here.
        """
        counts = Counter(gradient.index for gradient in gradients)
        table = torch.zeros(4, len(self._parameters), dtype=torch.int64)
        rows = [(1, counts[i], one.place) for i, one in first.items()]
        table[:3, list(first)] = torch.tensor(rows, dtype=torch.int64).view(-1, 3).t()
        table[3] = torch.tensor([not p.is_meta and p.grad is not None and p.numel() > 0 for p in self._parameters])
        return table

    def _own_norms(self, first: Mapping[int, OwnGradient], norm_type: float, foreach: bool | None) -> Tensor:
        """[parameters], on the device in fp64: norms, or powers of shards' norms; elsewhere the neutral element."""
        absent = inf if norm_type == -inf and self.num_replicas is not None else 0.0
        table = torch.full((len(self._parameters),), absent, dtype=torch.float64, device=self.device)
        if not first:
            return table
        values = [gradient.value for gradient in first.values()]
        if foreach is False:  # as torch computes them with this `foreach`
            listed = [torch.linalg.vector_norm(value, norm_type) for value in values]
        else:
            listed = list(torch._foreach_norm(values, norm_type))
        norms, indices = torch.stack(listed).double(), tuple(first)
        if indices not in self._places:  # once for each set of parameters: the host waits for a copy to the device
            replicas = None
            if self.num_replicas is not None:
                numbers = [self.num_replicas(self._parameters[i]) for i in indices]
                replicas = torch.tensor(numbers, dtype=torch.float64, device=self.device)
            self._places[indices] = torch.tensor(indices, device=self.device), replicas
        index, replicas = self._places[indices]
        if replicas is not None and not isinf(norm_type):
            norms = norms ** (norm_type or 1) / replicas
        return table.index_copy_(0, index, norms)

    def _exchange(self, norms: Tensor, norm_type: float) -> Tensor:
        """The norms of all ranks' gradients, on each of them."""
        if self.groups is None:
            return norms
        if self.num_replicas is not None and isinf(norm_type):
            # A reduction by gloo would lose NaN.
            parts = [torch.empty_like(norms) for _ in range(self.groups[1].size())]
            dist.all_gather(parts, norms, group=self.groups[1])
            tables = torch.stack(parts)
            return tables.amax(0) if norm_type > 0 else tables.amin(0)
        dist.all_reduce(norms, group=self.groups[1])
        return norms if self.num_replicas is None else norms ** (1 / (norm_type or 1))


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """The address and the number of elements, which are the same for a tensor, its `.data` and its `.detach()`."""
    with torch._C.DisableTorchFunctionSubclass():
        return (tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)), tensor.numel()


Original = Callable[..., Any]
Tensors = Tensor | Iterable[Tensor]
_Found = TypeVar("_Found")


def _patched() -> dict[str, PatchedFunction]:
    """The functions, which give the whole model's values for parameters of the modules that run.

    Raises:
        UnsupportedError: this version of torch or Lightning defines one of them in another way.
    """
    originals: dict[str, Any] = {}  # torch's call each other
    patches = {}
    for function, for_run in _FUNCTIONS.items():
        _check(function)
        patch = PatchedFunction(function, partial(_for_runs, for_run), originals)
        name = patch.original.__name__
        originals[name], patches[name] = patch.original, patch
    return patches


PATCHES: PatchedInRuns[GradientNorms] = PatchedInRuns(_patched)


def _for_runs(for_run: Callable[..., Any], original: Original, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    with ExitStack() as stack:
        for run in PATCHES.running:
            stack.enter_context(run.unguarded())
        return for_run(original, *bound.arguments.values())


def _check(function: Callable[..., Any]) -> None:
    if not PatchedFunction.is_possible(function) or inspect.unwrap(function).__kwdefaults__:
        raise UnsupportedError(
            f"{function.__name__} isn't a plain function in torch {torch.__version__}, or another package has "
            "replaced it. Use torch 2.10 to 2.13, without such a package, so that it sees other ranks' gradients."
        )


def _clip_grad_norm(
    original: Original, parameters: Tensors, max_norm: float, norm_type: float, raises: bool, foreach: bool | None
) -> Tensor:
    listed = _listed(parameters)
    found = _run_of("clip_grad_norm_", GradientNorms.parameters_among, listed)
    if found is None:
        return original(listed, max_norm, norm_type, raises, foreach)  # type: ignore[no-any-return]
    run, listed = found
    total = run.total(run.gradients_of(listed), float(norm_type), foreach=foreach)
    _check_finite(total, norm_type, raises)
    PATCHES.functions["_clip_grads_with_norm_"].original(_own(listed), max_norm, total, foreach)
    return total


def _get_total_norm(
    original: Original, tensors: Tensors, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    listed = _listed(tensors)
    found = _run_of("get_total_norm", GradientNorms.gradients_among, listed)
    if found is None:
        return original(listed, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
    run, gradients = found
    total = run.total(gradients, float(norm_type), foreach=foreach)
    _check_finite(total, norm_type, error_if_nonfinite)
    return total


def _clip_each(name: str) -> Callable[..., None]:
    """A function that treats each gradient alone: it only has to leave out other ranks' placeholders."""

    def clip(original: Original, parameters: Tensors, *args: Any) -> None:
        listed = _listed(parameters)
        found = _run_of(name, GradientNorms.parameters_among, listed)
        original(listed if found is None else _own(found[1]), *args)

    return clip


def _grad_norm(
    original: Original, module: nn.Module, norm_type: float | str, group_separator: str
) -> dict[str, float | Tensor]:
    named = list(module.named_parameters())
    found = _run_of("grad_norm", GradientNorms.parameters_among, [one for _, one in named]) if named else None
    if found is None or float(norm_type) <= 0:
        return original(module, norm_type, group_separator)  # type: ignore[no-any-return]
    run, parameters = found
    order = float(norm_type)
    of = run.by_parameter(run.gradients_of(parameters), order)
    norms = {f"grad_{order}_norm{group_separator}{name}": of[parameter] for name, parameter in named if parameter in of}
    if not norms:
        return {}
    return {**norms, f"grad_{order}_norm_total": torch.tensor(list(norms.values())).norm(order)}


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    get_total_norm: _get_total_norm,
    clip_grads_with_norm_: _clip_each("clip_grads_with_norm_"),
    clip_grad_norm_: _clip_grad_norm,
    clip_grad_value_: _clip_each("clip_grad_value_"),
    grad_norm: _grad_norm,
}
"""the code that each function runs for a run; functions that others call come first"""


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _own(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that this rank holds."""
    return [parameter for parameter in parameters if not parameter.is_meta]


def _run_of(
    function: str, find: Callable[[GradientNorms, Sequence[Tensor]], tuple[list[_Found], list[Tensor]]], passed: Any
) -> tuple[GradientNorms, list[_Found]] | None:
    """The run to whose module the passed tensors belong, and what it finds among them; None: they belong to none.

    An empty list belongs to the run: a rank that holds none of the selected parameters takes part, too.

    Raises:
        UnsupportedError: they belong to the run only in part, or a step is running.
    """
    for run in reversed(PATCHES.running):
        found, others = find(run, passed)
        if passed and len(others) == len(passed):
            continue
        if others:
            raise UnsupportedError(
                f"{function} was called on {len(passed) - len(others)} parameters or gradients of the module together "
                f"with {len(others)} other tensors (the first: {tuple(others[0].shape)}). Call it on them separately."
            )
        if passed or not run.in_batch:
            run.check_outside_batch(function)
            return run, found
    return None


def _check_finite(total: Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    """Raise torch's own error."""
    PATCHES.functions["_get_total_norm"].original([total], norm_type, error_if_nonfinite)
