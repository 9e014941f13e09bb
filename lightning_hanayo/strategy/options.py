"""The options of `HanayoStrategy`, checked when it is constructed."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from math import prod
from os import PathLike, fspath
from pathlib import Path
from reprlib import repr as repr_of
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import nn

from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.pipeline_parallel.batches.plan import BatchRule, SplitFunction
from lightning_hanayo.planner.layout import check_schedule
from lightning_hanayo.schedule import CostModel
from lightning_hanayo.schedule.number_checks import LARGEST, check_num_actions, is_number, is_size, is_whole
from lightning_hanayo.strategy.losses.loss_weight import LossWeight
from lightning_hanayo.topology import MAX_RANKS, cube_sizes

AutoInt = Literal["auto"] | int
Recompute = Literal["none", "blocks", "attention"] | int | Callable[[str, nn.Module], bool]
"""modules that run again in the backward"""
MAX_PIECES = 1024
"""of a 3-D product: each needs collectives of its own"""
MAX_TIMEOUT = timedelta(days=365)
"""which torch can add to its clocks"""
_FROM_1 = "a whole number of at least 1"
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


@dataclass(frozen=True)
class Options:
    """The constructor's arguments; `HanayoStrategy` documents them."""

    pipeline_parallel_size: AutoInt
    num_waves: AutoInt
    cube: int | tuple[int, int, int]
    data_parallel_size: AutoInt
    num_microbatches: AutoInt
    blocks: str | None
    loss_weight: Literal["auto"] | LossWeight
    step: Literal["auto", "microbatch", "batch"]
    activation_budget: float | None
    cube_outside: Literal["share", "replicate", "tokens"]
    schedule: str
    balance: Literal["parameters", "time"] | Sequence[float]
    costs: CostModel | None
    cube_memory: Literal["gathered", "shards"]
    cube_weights: Literal["microbatch", "batch"]
    cube_pieces: int
    pairs: bool
    cube_tokens: int | None
    cube_exclude: Sequence[str]
    experts: Literal["whole", "cube"]
    timeout: timedelta
    batch_dim: int
    split_batch: SplitFunction | None
    whole: Sequence[str]
    init_from: str | Path | Mapping[str, str | Path] | None
    master_weights: Literal["fp32"] | None
    shard_optimizer: bool
    offload_optimizer: bool
    recompute: Recompute
    tied_gradients: Literal["in_order", "at_once"]
    # A model that was cut for other options of these can be used as it is.
    layout: str | None = field(compare=False)
    save_full: bool = field(compare=False)
    save_async: bool = field(compare=False)
    verify_checkpoints: bool = field(compare=False)
    load_anyway: Collection[str] = field(compare=False)
    nonfinite: Literal["raise", "skip", "ignore"] = field(compare=False)
    check_replicas: int | None = field(compare=False)
    restore_module: bool = field(compare=False)

    def __post_init__(self) -> None:
        self._check_sizes()
        for name, kind in get_type_hints(Options).items():
            if get_origin(kind) is Literal:
                self._choice(name, get_args(kind))
        if not callable(self.loss_weight):
            self._choice("loss_weight", ("auto", "samples", "tokens", "shifted_tokens", "sum"))
        budget = self.activation_budget
        if budget is not None and (not is_number(budget) or budget == 0):
            raise HanayoError(f"activation_budget={budget!r}: expected a positive number of M_a, or None")
        if self.master_weights is not None:
            self._choice("master_weights", ("fp32",))
        self._check_recompute()
        self._names("cube_exclude", "('experts',)")
        blocks: Any = self.blocks
        if blocks is not None and (not isinstance(blocks, str) or not blocks):
            raise HanayoError(
                f"blocks={blocks!r}: expected the name of the block stack, 'model.layers', names of lists or "
                f"modules that are called in turn, or None"
            )
        self._check_balance()
        self._check_timeout()
        self._check_batch_rule()
        self._check_folders()
        self._check_checkpoints()
        self._check_schedule()

    def _check_sizes(self) -> None:
        for name in _SIZES:
            if not (isinstance(value := getattr(self, name), str) and value == "auto"):
                self._whole(name, f"'auto' or {_FROM_1}")
        self._whole("cube_pieces", _FROM_1, most=MAX_PIECES)
        if self.cube_tokens is not None:
            self._whole("cube_tokens", f"{_FROM_1}, or None")
        if self.check_replicas is not None:
            self._whole("check_replicas", f"{_FROM_1}, or None")
        self._whole("batch_dim", "a whole number of at least 0", least=0)
        cube: Any = self.cube
        if not is_size(cube) and not (isinstance(cube, (tuple, list)) and len(cube) == 3 and all(map(is_size, cube))):
            raise HanayoError(f"cube={cube!r}: expected p, for a p x p x p cube, or the sizes (x, y, z)")
        self._set("cube", int(cube) if is_size(cube) else tuple(map(int, cube)))
        self._check_bounds()

    def _check_recompute(self) -> None:
        if callable(self.recompute):
            return
        if isinstance(self.recompute, str):
            self._choice("recompute", ("none", "blocks", "attention"))
        else:
            expected = (
                "'none', 'blocks', 'attention', a number of blocks per stage, or a function (name, block) -> bool"
            )
            self._whole("recompute", expected, least=0)

    def _check_bounds(self) -> None:
        """Reject sizes that no machine has, and schedules that would take minutes to build, by lower bounds."""
        sizes = {name: getattr(self, name) for name in _SIZES if getattr(self, name) != "auto"}
        known = dict.fromkeys(_SIZES, 1) | sizes
        ranks = known["pipeline_parallel_size"] * known["data_parallel_size"] * prod(cube_sizes(self.cube))
        if ranks > MAX_RANKS:
            raise HanayoError(
                f"pipeline_parallel_size x data_parallel_size x cube are at least {ranks:,} ranks, and at most "
                f"{MAX_RANKS:,} can be"
            )
        stages_per_rank = 2 * known["num_waves"] if known["num_waves"] > 1 else 1
        try:
            check_num_actions(known["pipeline_parallel_size"], known["num_microbatches"], stages_per_rank)
        except HanayoError as error:
            sizes.pop("data_parallel_size", None)
            raise HanayoError(f"{', '.join(f'{name}={size}' for name, size in sizes.items())}: {error}") from None

    def _check_balance(self) -> None:
        if isinstance(self.balance, str):
            return self._choice("balance", ("parameters", "time"))
        try:
            costs = tuple(self.balance)
        except TypeError:
            costs = ()
        if not costs or not all(is_number(cost) and cost <= LARGEST for cost in costs):
            raise HanayoError(
                f"balance={repr_of(self.balance)}: expected 'parameters', 'time', or one finite number of at least 0 "
                f"per block"
            )
        return self._set("balance", tuple(map(float, costs)))

    def _check_timeout(self) -> None:
        value: Any = self.timeout
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        if not is_number(seconds) or not 0 < seconds <= MAX_TIMEOUT.total_seconds():
            raise HanayoError(
                f"timeout={value!r}: expected a timedelta or a number of seconds, above 0 and at most "
                f"{MAX_TIMEOUT.days} days"
            )
        self._set("timeout", timedelta(seconds=float(seconds)))

    def _check_schedule(self) -> None:
        if isinstance(self.schedule, PathLike):
            self._set("schedule", fspath(self.schedule))
        if not isinstance(self.schedule, str):
            raise HanayoError(f"schedule={self.schedule!r}: expected a name, the path of a CSV table, or 'auto'")
        check_schedule(self.schedule)

    @property
    def batch_rule(self) -> BatchRule:
        """How batches are cut."""
        return BatchRule(self.batch_dim, self.split_batch, frozenset(self.whole))

    @property
    def init_folders(self) -> dict[str, Path]:
        """The folders with a model's first values, by the name of the module they are for; "": the one they fit."""
        folders = self.init_from if isinstance(self.init_from, Mapping) else {"": self.init_from}
        return {name: Path(folder) for name, folder in folders.items() if folder is not None}

    def _check_folders(self) -> None:
        value: Any = self.init_from
        paths = [*value, *value.values()] if isinstance(value, Mapping) else [value]
        if not all(path is None or (isinstance(path, (str, Path)) and str(path)) for path in paths):
            raise HanayoError(
                f"init_from={value!r}: expected a folder with model.safetensors, a dictionary of such folders by the "
                f"names of the modules they are for, or None"
            )

    def _check_checkpoints(self) -> None:
        flags = ("save_full", "save_async", "verify_checkpoints")
        for name in (*flags, "pairs", "shard_optimizer", "offload_optimizer", "restore_module"):
            if not isinstance(getattr(self, name), bool):
                raise HanayoError(f"{name}={getattr(self, name)!r}: expected True or False")
        if self.pairs and self.step == "batch":
            raise HanayoError(
                "step='batch' and pairs=True: a pair is a forward and a backward of two micro-batches, and here all "
                "forwards come first. Leave one of them out."
            )
        if self.save_full and self.save_async:
            raise HanayoError(
                "save_full=True gathers the whole checkpoint on rank 0, which can't be done while training goes on. "
                "Leave out save_async=True, or save folders and run `hanayo ckpt export` on those that you need whole."
            )
        self._names("load_anyway", "('optimizer_state',)")
        for name in self.load_anyway:
            if name not in LOAD_ANYWAY:
                raise HanayoError(
                    f"load_anyway={self.load_anyway!r}: {name!r} is unknown; {nearest(name, LOAD_ANYWAY)}"
                )

    def _check_batch_rule(self) -> None:
        if self.batch_dim and self.loss_weight == "shifted_tokens":
            raise HanayoError(
                f"loss_weight='shifted_tokens' needs labels [batch, seq], but batch_dim={self.batch_dim}. Set "
                f"loss_weight=lambda micro_batch: int((micro_batch['labels'][1:] != -100).sum())"
            )
        if self.split_batch is not None and not callable(self.split_batch):
            raise HanayoError(
                f"split_batch={self.split_batch!r}: expected a function (batch, n) that returns a list of at most n "
                f"micro-batches, or None"
            )
        self._names("whole", "('weights',)")

    def _names(self, name: str, example: str) -> None:
        names: Any = getattr(self, name)
        if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(one, str) for one in names):
            raise HanayoError(f"{name}={names!r}: expected a sequence of names, such as {example}")

    def _whole(self, name: str, expected: str, *, least: int = 1, most: int | None = None) -> None:
        """Check a whole number, also one of NumPy, which becomes Python's."""
        value = getattr(self, name)
        if not is_whole(value) or value < least:
            raise HanayoError(f"{name}={value!r}: expected {expected}")
        if most is not None and value > most:
            raise HanayoError(f"{name}={value!r}: expected at most {most:,}")
        self._set(name, int(value))

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, str) or value not in choices:
            raise HanayoError(f"{name}={value!r} is unknown; {nearest(str(value), choices)}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
