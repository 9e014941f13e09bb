"""Measures what a run does before its second batch, phase by phase: `python -m recipes.large.startup`.

llama3-70b-64xh100    80 blocks of width 8192, P=2 W=4, cube 4x2x1, D=4
here                  80 blocks of width 128,  P=2 W=4, cube 2x1x1, D=1     4 processes on this machine

A rank's own work before the first batch depends on the number of modules and tensors and not on their width, but for
what it reads. Reading is measured with fewer, wider blocks, and compared with reading the same bytes alone.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.strategy import session
from lightning_hanayo.strategy.groups import ProcessGroups
from lightning_hanayo.strategy.setup import build_pipeline
from recipes.benchmarks.fits import fit_on_rank
from recipes.benchmarks.harness import ORDINARY, run_ranks
from recipes.large.module import CausalLM
from recipes.large.operations import PAGE
from recipes.large.plans import FOLDER
from recipes.paper.page import fill, markdown

RANKS = 4
LAYOUT: dict[str, Any] = {
    "pipeline_parallel_size": 2, "num_waves": 4, "cube": (2, 1, 1), "num_microbatches": 4, "recompute": "blocks",
    "cube_outside": "tokens", "step": "microbatch",
}  # fmt: skip
"""that of llama3-70b on 64 H100, for four ranks"""
CONTEXT = 64
BATCHES = 2
ROUNDS = 3
"""of reading"""
TIMEOUT_S = 900.0

PHASES: dict[str, Sequence[tuple[object, str]]] = {
    "processes join": [(HanayoStrategy, "connect_processes")],
    "process groups": [(ProcessGroups, "create")],
    "model built, on the meta device": [(CausalLM, "configure_model")],
    "layout planned and checked": [(session, "plan_for")],
    "model cut, 3-D layers put in": [(session, "build_pipeline")],
    "weights read": [(build_pipeline, "load_on_all_ranks")],
    "optimizer": [(HanayoStrategy, "setup_optimizers")],
    "set-up besides": [(HanayoStrategy, "setup_environment"), (HanayoStrategy, "setup")],
}
"""the functions that make them up; what one calls of another phase counts there"""


_graphs: list[Any] = []
"""that this process has compiled"""


class Compiled(CausalLM):
    """Compiles its blocks."""

    @override
    def configure_model(self) -> None:
        is_new = self.net is None
        super().configure_model()
        for block in self.net.model.layers if is_new else ():  # type: ignore[union-attr]
            block.compile(backend=_compile)


def _compile(graph: Any, inputs: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx

    _graphs.append(graph)
    return compile_fx(graph, inputs)


@dataclass
class Phases(Callback):
    """The seconds of one rank by phase: by the clock, and of its processor."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    """file, first byte, and the one after the last"""
    _inside: list[list[float]] = field(default_factory=list)
    """of each phase under way: the seconds of others within it"""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside it, the phases and what is read are recorded."""
        with ExitStack() as stack:
            for name, functions in PHASES.items():
                for owner, attribute in functions:
                    timed = self._timed(name, getattr(owner, attribute))
                    is_static = owner is ProcessGroups
                    replacement = staticmethod(timed) if is_static else timed
                    stack.enter_context(mock.patch.object(owner, attribute, replacement))
            stack.enter_context(mock.patch.object(Storage, "read", self._recorded(Storage.read)))
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside, without the phases within it."""
        start = _now()
        self._inside.append([0.0, 0.0])
        try:
            yield
        finally:
            taken = [after - before for after, before in zip(_now(), start, strict=True)]
            inside, total = self._inside.pop(), self.seconds.setdefault(name, [0.0, 0.0])
            for place, whole in enumerate(taken):
                total[place] += whole - inside[place]
                if self._inside:
                    self._inside[-1][place] += whole

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return call

    def _recorded(self, function: Callable[..., memoryview]) -> Callable[..., memoryview]:
        def read(storage: Storage, name: str, start: int = 0, stop: int | None = None) -> memoryview:
            found = function(storage, name, start, stop)
            self.reads.append((os.path.join(storage.path, name), start, start + len(found)))
            return found

        return read

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = self.phase(f"batch {batch_idx + 1}")
        self._batch.__enter__()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batch.__exit__(None, None, None)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Start:
    """What one rank has measured."""

    seconds: Mapping[str, Sequence[float]]
    read: int
    """bytes of weights"""
    alone: float
    """seconds of reading the same bytes, and doing nothing with them"""
    graphs: int
    """that were compiled"""


@dataclass(frozen=True)
class Case:
    """A Llama that starts from a folder of bf16 weights."""

    width: int
    blocks: int
    folder: Path
    is_compiled: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Llama 3 70B's, with these sizes."""
        given = yaml.safe_load((FOLDER / "llama3-70b.yaml").read_text(encoding="utf-8"))["model"]["init_args"]
        return {
            **given["config"],
            "vocab_size": 8192, "hidden_size": self.width, "intermediate_size": 7 * self.width // 2,
            "num_hidden_layers": self.blocks, "num_attention_heads": 8, "num_key_value_heads": 2,
        }  # fmt: skip

    def write(self) -> None:
        """Write random weights into the folder."""
        module = CausalLM("llama", self.config)
        module.configure_model()
        module.net.bfloat16().save_pretrained(self.folder)  # type: ignore[union-attr, operator]
        os.sync()

    def forget(self) -> None:
        """Drop the folder's files from the page cache."""
        for path in self.folder.glob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def start(self) -> list[Start]:
        """Start on as many new processes, and train two batches."""
        return [one for _, one in run_ranks(partial(_start, case=self), RANKS, [ORDINARY] * RANKS, TIMEOUT_S)]


def _start(rank: int, num_ranks: int, *, case: Case) -> Start:
    torch.manual_seed(0)
    kind, phases = Compiled if case.is_compiled else CausalLM, Phases()
    batches = [{"input_ids": torch.randint(8192, (8, CONTEXT))} for _ in range(BATCHES)]
    module = kind("llama", case.config)
    with phases.recording():
        strategy = HanayoStrategy(init_from=case.folder, **LAYOUT)
        fit_on_rank(
            rank, num_ranks, module, batches,
            strategy=strategy, precision="bf16-mixed", callbacks=[phases],
        )  # fmt: skip
    if rank == 0:
        case.forget()
    dist.barrier()
    start = time.perf_counter()
    for path, first, end in phases.reads:
        with open(path, "rb", buffering=0) as file:
            file.seek(first)
            file.readinto(bytearray(end - first))
    alone = time.perf_counter() - start
    num_bytes = sum(end - first for _, first, end in phases.reads)
    return Start(phases.seconds, num_bytes, alone, len(_graphs))


def measured(folder: Path) -> str:
    """The table of the phases. Prints what was read and compiled, too."""
    deep, wide = Case(128, 80, folder / "deep"), Case(1024, 16, folder / "wide")
    for case in (deep, wide):
        case.write()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    runs = [deep.start(), replace(deep, is_compiled=True).start()]
    print("graphs that a rank compiles:", [one.graphs for one in runs[1]])
    for _ in range(ROUNDS):
        wide.forget()
        ranks = wide.start()
        seconds = max(one.seconds["weights read"][0] for one in ranks), max(one.alone for one in ranks)
        print(f"{sum(one.read for one in ranks) / 1e6:.0f} MB read in {seconds[0]:.2f} s, alone in {seconds[1]:.2f} s")
    names = [*PHASES, *(f"batch {number + 1}" for number in range(BATCHES))]
    rows = [(name, *(f"{most:.2f}" for run in runs for most in _most(run, name))) for name in names]
    return markdown(("phase", "s", "CPU s", "blocks compiled: s", "CPU s"), rows)


def _most(ranks: Sequence[Start], name: str) -> list[float]:
    """Of all ranks, by the clock and of a processor."""
    return [max(one.seconds[name][place] for one in ranks) for place in (0, 1)]


def main() -> None:
    """Measure, and write the page's table."""
    argparse.ArgumentParser(prog="python -m recipes.large.startup", description=__doc__).parse_args()
    with TemporaryDirectory(prefix="startup-") as folder:
        table = measured(Path(folder))
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), {"start-up": table}), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
