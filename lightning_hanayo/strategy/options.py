"""The options of `HanayoStrategy`, checked when it is constructed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.planner.layout import check_schedule
from lightning_hanayo.runtime.batches.plan import BatchRule, SplitFunction
from lightning_hanayo.schedule import CostModel
from lightning_hanayo.strategy.losses.loss_weight import LossWeight

AutoInt = Literal["auto"] | int
LOAD_ANYWAY = ("nan", "dtype", "optimizer_state", "samples")
"""what a checkpoint is refused for unless `load_anyway` accepts it"""


@dataclass(frozen=True)
class Options:
    """The constructor's arguments; `HanayoStrategy` documents them."""

    pipeline_parallel_size: AutoInt
    num_waves: AutoInt
    cube: int | tuple[int, int, int]
    data_parallel_size: AutoInt
    num_microbatches: AutoInt
    blocks: str | None
    loss_weight: LossWeight
    activation_budget: float | None
    cube_outside: Literal["share", "replicate"]
    schedule: str
    balance: Literal["parameters", "time"] | Sequence[float]
    costs: CostModel | None
    cube_memory: Literal["gathered", "shards"]
    cube_pieces: int
    cube_tokens: int | None
    cube_exclude: Sequence[str]
    timeout: timedelta
    batch_dim: int
    split_batch: SplitFunction | None
    whole: Sequence[str]
    init_from: str | Path | Mapping[str, str | Path] | None
    master_weights: Literal["fp32"] | None
    tied_gradients: Literal["in_order", "at_once"]
    # A model that was cut for other options of these can be used as it is.
    save_full: bool = field(compare=False)
    save_async: bool = field(compare=False)
    verify_checkpoints: bool = field(compare=False)
    load_anyway: Collection[str] = field(compare=False)

    def __post_init__(self) -> None:
        for name in ("pipeline_parallel_size", "num_waves", "data_parallel_size", "num_microbatches"):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise HanayoError(f"{name}={value!r}: expected 'auto' or a whole number from 1 on")
        self._choice("cube_outside", ("share", "replicate"))
        if isinstance(self.balance, str):
            self._choice("balance", ("parameters", "time"))
        if not callable(self.loss_weight):
            self._choice("loss_weight", ("samples", "tokens", "shifted_tokens", "sum"))
        if self.activation_budget is not None and self.activation_budget <= 0:
            raise HanayoError(f"activation_budget={self.activation_budget}: expected a positive number of M_a, or None")
        if self.cube_pieces < 1:
            raise HanayoError(f"cube_pieces={self.cube_pieces}: expected a whole number from 1 on")
        self._choice("cube_memory", ("gathered", "shards"))
        self._choice("tied_gradients", ("in_order", "at_once"))
        if self.master_weights is not None:
            self._choice("master_weights", ("fp32",))
        sizes: tuple[Any, ...] = (self.cube,) * 3 if isinstance(self.cube, int) else tuple(self.cube)
        if len(sizes) != 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
            raise HanayoError(f"cube={self.cube!r}: expected p, for a p x p x p cube, or the sizes (x, y, z)")
        self._names("cube_exclude", "('experts',)")
        self._check_batch_rule()
        self._check_folders()
        self._check_checkpoints()
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
        if not all(path is None or isinstance(path, (str, Path)) for path in paths):
            raise HanayoError(
                f"init_from={value!r}: expected a folder with model.safetensors, a dictionary of such folders by the "
                f"names of the modules they are for, or None"
            )

    def _check_checkpoints(self) -> None:
        for name in ("save_full", "save_async", "verify_checkpoints"):
            if not isinstance(getattr(self, name), bool):
                raise HanayoError(f"{name}={getattr(self, name)!r}: expected True or False")
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
        dim: Any = self.batch_dim
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
            raise HanayoError(f"batch_dim={self.batch_dim!r}: expected a whole number from 0 on")
        if dim and self.loss_weight == "shifted_tokens":
            raise HanayoError(
                f"loss_weight='shifted_tokens' needs labels [batch, seq], but batch_dim={dim}. Set loss_weight=lambda "
                f"micro_batch: int((micro_batch['labels'][1:] != -100).sum())"
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

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value: Any = getattr(self, name)
        if value not in choices:
            raise HanayoError(f"{name}={value!r} is unknown; {nearest(str(value), choices)}")
