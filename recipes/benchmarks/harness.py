"""The harness of all benchmarks: command lines, rank processes, candidates in turn, figures as JSON, pages.

options --> measure --> Findings: print the page; write --json, --table and pictures --> 0
                                                            wrong arguments: 2, interrupted: 130, no cluster: 3
measure --> run(work, argument, a process for each rank) --> in_turn(candidates, rounds) --> Summary of each one's times

Imports no torch, so that `--help` is quick and a process can set itself up before torch starts threads.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.monitor.processes import end_with_parent
from recipes.paper.page import markdown

LOOPBACK = "gloo over loopback, processes on one machine"
T = TypeVar("T")

# figures


@dataclass(frozen=True)
class Summary:
    """Median, least and greatest value of a figure over the rounds."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> "Summary":
        """Summarise one value per round."""
        return Summary(median(values), min(values), max(values))


def in_turn(candidates: Sequence[T], rounds: int, warm_up: int = 0) -> Iterator[tuple[bool, T]]:
    """All candidates once per round, each round beginning with another one, after rounds that don't count.

    Example:
        >>> list(in_turn("ab", rounds=2, warm_up=1))
        [(False, 'b'), (False, 'a'), (True, 'a'), (True, 'b'), (True, 'b'), (True, 'a')]
    """
    for turn in range(-warm_up, rounds):
        first = turn % len(candidates) if candidates else 0
        for candidate in (*candidates[first:], *candidates[:first]):
            yield turn >= 0, candidate


def read(kind: Any, plain: Any) -> Any:
    """A value of this type from its JSON, as `dataclasses.asdict` made it: also dataclasses within others."""
    arguments, origin = get_args(kind), get_origin(kind)
    if is_dataclass(kind):
        known, hints = {one.name for one in fields(kind)}, get_type_hints(kind)
        make: Callable[..., Any] = kind  # type: ignore[assignment]
        return make(**{name: read(hints[name], plain[name]) for name in known & plain.keys()})
    if origin is tuple or origin is list:
        return origin(read(arguments[0], one) for one in plain)
    if origin in (dict, Mapping):
        return {arguments[0](key): read(arguments[1], one) for key, one in plain.items()}
    if type(None) in arguments and plain is not None:
        return read(next(one for one in arguments if one is not type(None)), plain)
    return plain


def stored(path: Path, make: Callable[[Any], T], command: str = "this command") -> T:
    """Read figures that `--json` has written.

    Raises:
        HanayoError: the file can't be read, or is another one.
    """
    try:
        return make(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HanayoError(f"{path}: expected what `--json` of {command} writes; {error!r}") from error


def page(*parts: str | Sequence[str]) -> str:
    """A page of these paragraphs and, where a part isn't one text, lists; empty ones are left out."""
    texts = (part if isinstance(part, str) else "\n".join(f"- {line}" for line in part) for part in parts)
    return "\n\n".join(filter(None, texts)) + "\n"


Columns = Sequence[tuple[str, Callable[[Any], str]]]
"""of a table: their heads, and the functions that format a row's cells"""


def table(columns: Columns, rows: Iterable[Any]) -> str:
    """A Markdown table."""
    return markdown([head for head, _ in columns], ([cell(row) for _, cell in columns] for row in rows))


def ms(seconds: float, digits: int = 1) -> str:
    """Milliseconds, without the unit."""
    return f"{1e3 * seconds:.{digits}f}"


def span(one: Summary, digits: int = 1, scale: float = 1e3) -> str:
    """Least and greatest value, in milliseconds unless the scale is another one."""
    return f"{scale * one.least:.{digits}f}-{scale * one.most:.{digits}f}"


# command lines


@dataclass(frozen=True)
class Findings:
    """The results of a benchmark.

    Args:
        text: the tables, as Markdown.
        data: all figures, for JSON; also dataclasses.
        pictures: for each picture option the function that draws the file.
        code: the exit code.
    """

    text: str
    data: Mapping[str, Any]
    pictures: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    code: int = 0


def new_parser(name: str, about: str | None, **pictures: str) -> argparse.ArgumentParser:
    """The parser of `recipes.benchmarks.<name>`, with its file options. `pictures` maps an option to its help."""
    parser = argparse.ArgumentParser(prog=f"python -m recipes.benchmarks.{name}", description=about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    files = parser.add_argument_group("files")
    files.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    files.add_argument("--table", type=Path, metavar="FILE.md", help="write the printed table")
    for option, what in pictures.items():
        files.add_argument(f"--{option}", type=Path, metavar="FILE.png", help=what)
    return parser


def number(parser: argparse.ArgumentParser, name: str, default: Any, about: str, metavar: str = "N") -> None:
    """Add an option for a number, or several where the default is a list, of the default's type."""
    several = isinstance(default, list)
    values = default if several else [default]
    shown = " ".join(f"{value:g}" for value in values)
    kind = numeric if isinstance(values[0], float) else whole
    parser.add_argument(name, type=kind, default=default, nargs="+" if several else None, metavar=metavar,
                        help=f"{about} (default {shown})")  # fmt: skip


def whole(text: str) -> int:
    """Parse an integer that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value


def numeric(text: str) -> float:
    """Parse a number that is at least 0."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 0")
    return value


def run(measure: Callable[[argparse.Namespace], Findings], options: argparse.Namespace) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    try:
        found = measure(options)
    except HanayoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130
    print(found.text)
    if options.json:
        options.json.write_text(json.dumps(found.data, indent=1, default=asdict) + "\n")
    if options.table:
        options.table.write_text(found.text)
    for option, draw in found.pictures.items():
        if path := getattr(options, option):
            draw(path)
    return found.code


def run_on_cluster(measure: Callable[[argparse.Namespace], Findings], options: argparse.Namespace) -> int:
    """The same on emulated hosts, which SIGTERM removes, too. Returns 3, with a line, where there can be none."""
    from recipes.benchmarks.cluster import refusal

    if why := refusal():
        print(f"skipped: {why}", file=sys.stderr)
        return 3
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run(measure, options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def describe(configuration: str, *notes: str) -> list[str]:
    """Describe the machine, the configuration, and the load of other programs."""
    import torch

    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        f"torch {torch.__version__}, Python {platform.python_version()}, {configuration}",
        "; ".join((*notes, f"load average at the end {load}")),
    ]


# processes

Work = Callable[[int, Any], Any]
"""The function that each rank runs: (rank, argument) -> result, with `torch.distributed` (gloo) initialised."""
GROUP_TIMEOUT_S = 1800.0  # the caller has a shorter limit and kills ranks that hang
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_MALLOC = {-8: 1, -3: 1 << 25, -1: (1 << 31) - 1}
"""M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h: one heap, no separate mappings, no trimming"""


@dataclass(frozen=True)
class ProcessOptions:
    """How a process should run.

    Args:
        realtime: ask for real-time priority (SCHED_RR), so that other programs don't stretch the measured times.
        core: pin the process to this core; None: any core.
        prepare: called before torch starts threads.
    """

    realtime: bool = True
    core: int | None = None
    prepare: Callable[[], None] | None = None

    def apply(self) -> str:
        """Apply the options to this process, before it starts threads. Returns the priority it got, in words."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the parent, which ends its children
        if self.prepare is not None:
            self.prepare()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        if sys.platform != "linux":
            return f"no priority or timer slack to set on {sys.platform}"
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # end when the parent is killed
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # sleeps would end 50 us late otherwise
        keep_memory()
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})
        return _realtime() if self.realtime else "ordinary priority"


ORDINARY = ProcessOptions(realtime=False)


def keep_memory() -> None:
    """Let glibc keep freed memory.

    Otherwise it returns pages in some runs and faults them in again in the next step, which changes a step by 2 % or
    more in any runtime.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in _MALLOC.items():
            mallopt(option, value)


def _realtime() -> str:
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError as error:
        return f"real-time priority refused ({error.strerror}); ordinary priority"
    return "real-time priority (SCHED_RR)"


def run_ranks(work: Work, argument: Any, options: Sequence[ProcessOptions], timeout: float) -> list[tuple[str, Any]]:
    """Run `work` on fresh processes, one for each of the options, and end all of them whatever happens.

    Returns:
        For each rank the priority that it got, and the result of `work`.

    Raises:
        HanayoError: a rank failed or exited, or `timeout` seconds passed; the message holds the rank's traceback.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        try:
            ends: list[Connection] = []
            for rank, own in enumerate(options):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, len(options), Path(directory) / "store", own, work, argument, theirs)
                process: BaseProcess = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(ours)
            return _results(ends, time.monotonic() + timeout)
        finally:
            with uninterrupted():
                for process in processes:
                    process.kill()
                for process in processes:
                    process.join()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore a second ctrl-C until the cleanup is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _results(ends: list[Connection], deadline: float) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, Any]] = {}
    while len(found) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in found]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise HanayoError(f"ranks {[r for r in range(len(ends)) if r not in found]} didn't finish in time")
        for end in ready:
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                failure, priority, result = ends[rank].recv()
            except EOFError:
                failure, priority, result = "its process ended", "", None
            if failure:
                raise HanayoError(f"rank {rank} failed: {failure}")
            found[rank] = (priority, result)
    return [found[rank] for rank in range(len(ends))]


def _rank(
    rank: int, size: int, store: Path, options: ProcessOptions, work: Work, argument: Any, end: Connection
) -> None:
    """One rank's process."""
    end_with_parent()
    priority = ""
    try:
        priority = options.apply()
        result = _connected(rank, size, store, work, argument)
    except BaseException:
        end.send((traceback.format_exc(), priority, None))
    else:
        end.send(("", priority, result))


def _connected(rank: int, size: int, store: Path, work: Work, argument: Any) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        result = work(rank, argument)
        dist.barrier()  # no rank leaves while others still need it
        return result
    finally:
        dist.destroy_process_group()


# clocks


def sleep_until(deadline: float) -> None:
    """Sleep until `time.monotonic` reaches `deadline`, as all emulated devices do instead of computing."""
    if (left := deadline - time.monotonic()) > 0:
        time.sleep(left)  # a busy wait would be more exact, but would take a core from gloo's threads


def oversleep(seconds: float, tries: int = 40) -> float:
    """How much too late a sleep of `seconds` ends, in seconds: the median of several."""
    late = []
    for _ in range(tries):
        deadline = time.monotonic() + seconds
        sleep_until(deadline)
        late.append(time.monotonic() - deadline)
    return median(late)


def cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
