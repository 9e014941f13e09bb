"""The options of `HanayoStrategy`, checked when it is constructed."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from os import PathLike, fspath
from pathlib import Path
from reprlib import repr as repr_of
from types import NoneType, UnionType
from typing import Any, Concatenate, Literal, ParamSpec, Union, get_args, get_origin

from torch import nn

from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchRule, SplitFunction
from lightning_hanayo.planner.files import costs_from
from lightning_hanayo.planner.layout import check_schedule
from lightning_hanayo.schedule.number_checks import LARGEST, check_num_actions, is_number, is_size, is_whole
from lightning_hanayo.strategy.losses import LossWeight

AutoInt = Literal["auto"] | int
Recompute = Literal["none", "blocks", "attention"] | int | Callable[[str, nn.Module], bool]
"""modules that run again in the backward"""
MAX_PIECES = 1024
"""of a 3-D product: each needs collectives of its own"""
MAX_TIMEOUT = timedelta(days=365)
"""which torch can add to its clocks"""
_SIZES = ("pipeline_parallel_size", "num_waves", "data_parallel_size", "num_microbatches")
LOAD_ANYWAY = ("nan", "dtype", "optimizer_state", "samples")
"""problems for which a checkpoint is refused unless `load_anyway` accepts them"""


_INSTEAD = {
    "tensor_parallel_size|tensor_model_parallel_size|tp_size": "use cube=(1, n, 1)",
    "pipeline_model_parallel_size|pipeline_parallel|pp_size|num_stages": "use pipeline_parallel_size=n",
    "virtual_pipeline_model_parallel_size|num_model_chunks": "use num_waves=n, which makes 2 n stages on each rank",
    "micro_batch_size|micro_batches|train_micro_batch_size_per_gpu|n_microbatches": "use num_microbatches=n",
    "sharding_strategy|stage|zero_stage|use_distributed_optimizer": "use cube=(n, 1, 1) to shard weights, or "
    "shard_optimizer=True to shard the optimizer's states alone",
    "cpu_offload|offload_optimizer_device": "use offload_optimizer=True",
    "activation_checkpointing|activation_checkpointing_policy|recompute_granularity": "use recompute='blocks'",
    "auto_wrap_policy": "leave it out, as the stack of blocks is found, or name another stack by blocks='...'",
    "find_unused_parameters|static_graph|gradient_as_bucket_view|bucket_cap_mb": "leave it out: it isn't needed",
    "process_group_backend": "leave it out: GPUs use NCCL, and CPUs gloo",
    "measure_memory": "hanayo plan --given predicts each rank's memory, and WaveReport tells its peak",
}
"""what to do instead, by options of DDP, FSDP, DeepSpeed and Megatron"""


def check_names(strategy: type, names: Iterable[str]) -> None:
    """Check the names of options that a strategy is to get.

    Raises:
        HanayoError: it has no such option.
    """
    parameters = inspect.signature(strategy.__init__).parameters  # type: ignore[misc]
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return  # a subclass takes more
    for name in (name for name in names if name not in parameters):
        instead = next((advice for others, advice in _INSTEAD.items() if name in others.split("|")), None)
        close = get_close_matches(name, list(parameters)[1:], n=1)
        hint = instead or (f"did you mean {close[0]!r}?" if close else "help(HanayoStrategy) lists those it has")
        raise HanayoError(f"{strategy.__name__} has no option {name!r}: {hint}")


_P = ParamSpec("_P")


def takes(
    options: Callable[_P, "Options"],
) -> Callable[[Callable[[Any, dict[str, Any]], None]], Callable[Concatenate[Any, _P], None]]:
    """Give a constructor the parameters of `options`, which it gets as a dictionary of all arguments."""

    def decorate(constructor: Callable[[Any, dict[str, Any]], None]) -> Callable[Concatenate[Any, _P], None]:
        parameters = inspect.signature(options)

        @wraps(constructor)
        def __init__(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> None:
            given = parameters.bind(*args, **kwargs)
            given.apply_defaults()
            constructor(self, given.arguments)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(__init__)["__signature__"] = parameters.replace(parameters=(own, *parameters.parameters.values()))
        return __init__  # type: ignore[return-value]  # whose `self` could be given by name, too

    return decorate


@dataclass(frozen=True)
class Options:
    """The constructor's arguments; `HanayoStrategy` documents them."""

    pipeline_parallel_size: AutoInt = "auto"
    num_waves: AutoInt = "auto"
    cube: int | tuple[int, int, int] = 1
    data_parallel_size: AutoInt = "auto"
    num_microbatches: AutoInt = "auto"
    blocks: str | Sequence[str] | None = None
    loss_weight: Literal["auto"] | LossWeight = "auto"
    activation_budget: float | None = None
    cube_outside: Literal["share", "replicate", "tokens"] = "share"
    schedule: str = "auto"
    _: KW_ONLY
    step: Literal["auto", "microbatch", "batch"] = "auto"
    balance: Literal["parameters", "time"] | Sequence[float] = "parameters"
    cube_memory: Literal["gathered", "shards"] = "gathered"
    cube_weights: Literal["microbatch", "batch"] = "microbatch"
    cube_pieces: int = 1
    pairs: bool = False
    cube_tokens: int | None = None
    cube_exclude: Sequence[str] = ("experts",)
    experts: Literal["whole", "cube"] = "whole"
    costs: Any = None  # were CostModel named, jsonargparse would take a profile's path for its fields
    timeout: timedelta | float = timedelta(minutes=30)
    batch_dim: int = 0
    split_batch: SplitFunction | None = None
    whole: Sequence[str] = ()
    init_from: str | Path | Mapping[str, str | Path] | None = None
    master_weights: Literal["fp32"] | None = None
    recompute: Recompute = "none"
    shard_optimizer: bool = False
    offload_optimizer: bool = False
    tied_gradients: Literal["in_order", "at_once"] = "in_order"
    # A model that was cut for other options of these can be used as it is.
    save_full: bool = field(default=False, compare=False)
    save_async: bool = field(default=False, compare=False)
    verify_checkpoints: bool = field(default=True, compare=False)
    load_anyway: Collection[str] = field(default=(), compare=False)
    nonfinite: Literal["raise", "skip", "ignore"] = field(default="raise", compare=False)
    check_replicas: int | None = field(default=None, compare=False)
    restore_module: bool = field(default=False, compare=False)
    layout: str | Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self._set("costs", costs_from(self.costs))
        if isinstance(self.blocks, list | tuple) and _are_names(self.blocks):
            self._set("blocks", "+".join(self.blocks))
        for name, kind in ((one.name, one.type) for one in fields(self)):
            value, choices, rule = getattr(self, name), _choices(kind), _FLAG if kind is bool else _RULES.get(name)
            names = [choice for choice in choices if choice is not None]
            if isinstance(value, str | None) and value in choices:
                continue
            if names and (rule is None or isinstance(value, str)):
                raise HanayoError(f"{name}={value!r} is unknown; {nearest(str(value), names)}")
            if rule is not None and not rule[0](value):
                raise HanayoError(f"{name}={repr_of(value)}: expected {rule[1]}")
            if is_whole(value):  # maybe NumPy's
                self._set(name, int(value))
        if not isinstance(self.cube, int):
            self._set("cube", tuple(map(int, self.cube)))
        if not isinstance(self.balance, str):
            self._set("balance", tuple(map(float, self.balance)))
        self._set("timeout", timedelta(seconds=_seconds(self.timeout)))
        self._set("schedule", fspath(self.schedule))
        self._check_bounds()
        self._check_pairs_of_options()
        check_schedule(self.schedule)

    def _check_bounds(self) -> None:
        """Reject schedules that would take minutes to build, by lower bounds of their sizes."""
        names = ("pipeline_parallel_size", "num_waves", "num_microbatches")
        sizes = {name: getattr(self, name) for name in names if getattr(self, name) != "auto"}
        known = dict.fromkeys(names, 1) | sizes
        stages_per_rank = 2 * known["num_waves"] if known["num_waves"] > 1 else 1
        try:
            check_num_actions(known["pipeline_parallel_size"], known["num_microbatches"], stages_per_rank)
        except HanayoError as error:
            raise HanayoError(f"{', '.join(f'{name}={size}' for name, size in sizes.items())}: {error}") from None

    def _check_pairs_of_options(self) -> None:
        if self.pairs and self.step == "batch":
            raise HanayoError("step='batch' and pairs=True: a batch's forwards all come first. Leave one of them out")
        if self.save_full and self.save_async:
            advice = "Leave out save_async=True, or save folders, and make files of them by `hanayo ckpt export`"
            raise HanayoError(f"save_full=True gathers on rank 0, which training has to wait for. {advice}")
        for name in {*self.load_anyway} - {*LOAD_ANYWAY}:
            raise HanayoError(f"load_anyway={self.load_anyway!r}: {name!r} is unknown; {nearest(name, LOAD_ANYWAY)}")
        if self.batch_dim and self.loss_weight == "shifted_tokens":
            raise HanayoError(
                f"loss_weight='shifted_tokens' needs labels [batch, seq], but batch_dim={self.batch_dim}. Set "
                f"loss_weight=lambda micro_batch: int((micro_batch['labels'][1:] != -100).sum())"
            )

    @property
    def stack(self) -> str | None:
        """The name of the block stack, or several, joined by "+"; None: it is found."""
        assert isinstance(self.blocks, str | None)
        return self.blocks

    @property
    def transfer_time(self) -> timedelta:
        """How long a transfer may take."""
        assert isinstance(self.timeout, timedelta)
        return self.timeout

    @property
    def batch_rule(self) -> BatchRule:
        """How batches are cut."""
        return BatchRule(self.batch_dim, self.split_batch, frozenset(self.whole))

    @property
    def init_folders(self) -> dict[str, Path]:
        """The folders with a model's first values, by the name of the module they are for; "": the one they fit."""
        folders = self.init_from if isinstance(self.init_from, Mapping) else {"": self.init_from}
        return {name: Path(folder) for name, folder in folders.items() if folder is not None}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The names that the `Literal`s in a type allow, in their order, and None if it does."""
    if kind is NoneType:
        return (None,)
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(value for part in get_args(kind) if get_origin(kind) in _UNIONS for value in _choices(part))


def _seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value


def _is_cube(value: Any) -> bool:
    return is_size(value) or (isinstance(value, (tuple, list)) and len(value) == 3 and all(map(is_size, value)))


def _are_costs(value: Any) -> bool:
    costs = [*value] if isinstance(value, Iterable) else []
    return bool(costs) and all(is_number(cost) and cost <= LARGEST for cost in costs)


def _are_folders(value: Any) -> bool:
    paths = [*value, *value.values()] if isinstance(value, Mapping) else [value]
    return all(path is None or (isinstance(path, (str, Path)) and bool(str(path))) for path in paths)


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(one, str) for one in value)


_UNIONS = (Union, UnionType)
_FROM_1 = "a whole number of at least 1"
_FLAG = lambda value: isinstance(value, bool), "True or False"
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_SIZES, (is_size, f"'auto' or {_FROM_1}")),
    **dict.fromkeys(("cube_tokens", "check_replicas"), (is_size, f"{_FROM_1}, or None")),
    **dict.fromkeys(("whole", "cube_exclude", "load_anyway"), (_are_names, "a sequence of names, as in ('weights',)")),
    "cube": (_is_cube, "p, for a p x p x p cube, or the sizes (x, y, z)"),
    "blocks": (
        lambda value: isinstance(value, str) and value != "",
        "the name of the block stack, 'model.layers', names of lists or modules that are called in turn, or None",
    ),
    "loss_weight": (callable, "'samples', 'tokens', 'shifted_tokens', 'sum', 'auto', or a function of a micro-batch"),
    "activation_budget": (lambda value: is_number(value) and value > 0, "a positive number of M_a, or None"),
    "schedule": (lambda value: isinstance(value, (str, PathLike)), "a name, the path of a CSV table, or 'auto'"),
    "balance": (_are_costs, "'parameters', 'time', or one finite number of at least 0 per block"),
    "cube_pieces": (lambda value: is_size(value) and value <= MAX_PIECES, f"{_FROM_1}, and at most {MAX_PIECES:,}"),
    "timeout": (
        lambda value: is_number(_seconds(value)) and 0 < _seconds(value) <= MAX_TIMEOUT.total_seconds(),
        f"a timedelta or a number of seconds, above 0 and at most {MAX_TIMEOUT.days} days",
    ),
    "batch_dim": (lambda value: is_whole(value) and value >= 0, "a whole number of at least 0"),
    "split_batch": (callable, "a function (batch, n) that returns a list of at most n micro-batches, or None"),
    "init_from": (_are_folders, "a folder with model.safetensors, a dictionary of such by names of modules, or None"),
    "recompute": (
        lambda value: callable(value) or (is_whole(value) and value >= 0),
        "'none', 'blocks', 'attention', a number of blocks per stage, or a function (name, block) -> bool",
    ),
}
"""for options that aren't names of choices alone: whether a value is valid, and which ones would be"""
