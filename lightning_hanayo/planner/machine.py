"""Machine: the rates by which the planner turns counted work into seconds; measured ones are in a JSON file.

{"name": "node07", "source": "hanayo doctor --measure, 2026-11-23", "ranks_per_node": 8, "memory": 8.0e10,
 "matmul": {"bfloat16": [[1024, 3.1e14], [4096, 6.2e14]], ...}, "memory_bandwidth": 2.9e12,
 "within_node": {"latency": 1.2e-05, "bandwidth": 3.6e11}, "between_nodes": {...}, "is_asynchronous": true, ...}
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import log
from os import PathLike
from pathlib import Path

from lightning_hanayo.errors import HanayoError, nearest, writing
from lightning_hanayo.planner.files import read_text, refusing
from lightning_hanayo.schedule.number_checks import is_number, is_size

MAX_BYTES = 1 << 20
"""of a file"""
DTYPES = ("bfloat16", "float16", "float32", "float64")
"""of which a machine may have rates"""
_INSTEAD = {
    "bfloat16": ("bfloat16", "float16", "float32", "float64"),
    "float16": ("float16", "bfloat16", "float32", "float64"),
    "float32": ("float32", "float64", "bfloat16", "float16"),
    "float64": ("float64", "float32", "bfloat16", "float16"),
}
"""whose rates are taken, in this order: as wide, wider, narrower"""


@dataclass(frozen=True)
class Link:
    """What a rank's messages and collectives take: `latency` seconds each, and 1 / `bandwidth` seconds per byte that
    the rank receives."""

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: float, messages: float = 1) -> float:
        """To receive so many bytes in so many messages, one after the other."""
        return messages * self.latency + num_bytes / self.bandwidth if num_bytes else 0.0


@dataclass(frozen=True)
class Machine:
    """Rates of one device, of the links between devices, and of the host. Seconds, bytes, and operations per second.

    Example:
        >>> round(machine("h100").matmul_rate("bfloat16", 4096) / 1e12)
        732
    """

    name: str
    ranks_per_node: int
    memory: float
    """bytes of a device"""
    matmul: Mapping[str, tuple[tuple[float, float], ...]]
    """by dtype: the operations per second of a product of two n x n matrices, for some n in ascending order"""
    memory_bandwidth: float
    """bytes that a device reads and writes per second"""
    within_node: Link
    between_nodes: Link
    is_asynchronous: bool = False
    """whether the host goes on while the device works, as with GPUs: then the slower of both counts, else their sum"""
    host_call: float = 0.0
    """of the host, for an operation that it starts"""
    host_collective: float = 0.0
    """of the host, for a collective that it starts and waits for"""
    host_action: float = 0.0
    """of the host, for a forward or backward of a stage besides: engine, messages"""
    peak: float = 0.0
    """operations per second of products in 16 bits by the data sheet; 0: not known"""
    source: str = ""
    """where the figures are from"""

    def __post_init__(self) -> None:
        links = {f"{name}.bandwidth": getattr(self, name).bandwidth for name in ("within_node", "between_nodes")}
        rates = [(name, rate) for name, table in self.matmul.items() for _, rate in table]
        positive = [(name, getattr(self, name)) for name in ("memory", "memory_bandwidth")]
        for name, value in (*positive, *links.items(), *rates):
            if not is_number(value) or not value:
                raise HanayoError(f"machine {self.name!r}: {name} is {value!r}; expected a number above 0")
        for name in ("host_call", "host_collective", "host_action", "peak"):
            if not is_number(getattr(self, name)):
                raise HanayoError(f"machine {self.name!r}: {name} is {getattr(self, name)!r}; expected 0 or more")
        if not is_size(self.ranks_per_node):
            raise HanayoError(f"machine {self.name!r}: ranks_per_node is {self.ranks_per_node!r}; expected 1 or more")
        if not rates or not set(self.matmul) <= set(DTYPES):
            raise HanayoError(f"machine {self.name!r}: matmul has {sorted(self.matmul)}; expected some of {DTYPES}")

    def matmul_rate(self, dtype: str, size: float) -> float:
        """Operations per second of products like that of two `size` x `size` matrices: the cube root of m k n.

        Between two measured sizes the rate is interpolated over log(size), outside of them that of the nearest. A dtype
        that wasn't measured has the rate of one that is as wide, or else of the next wider, or else next narrower one.
        """
        table = self.matmul[self._dtype_of_rate(dtype)]
        place = bisect_left([n for n, _ in table], size)
        if place in (0, len(table)):
            return table[min(place, len(table) - 1)][1]
        (low, slow), (high, fast) = table[place - 1 : place + 1]
        return slow + (fast - slow) * log(size / low) / log(high / low)

    def _dtype_of_rate(self, dtype: str) -> str:
        return next(one for one in _INSTEAD[dtype] if self.matmul.get(one))

    def rate_note(self, dtype: str) -> str:
        """Which rate counts for products in `dtype`, where it isn't simply that of `dtype`.

        Example:
            >>> machine("h100").rate_note("float16"), machine("h100").rate_note("bfloat16")
            (' at the rate of bfloat16', '')
        """
        name = self._dtype_of_rate(dtype)
        if self.peak and name == "float32":  # of a data sheet
            name = "TF32"
        allowed = ", which torch.set_float32_matmul_precision('high') allows" if name == "TF32" else ""
        return f" at the rate of {name}{allowed}" if name != dtype else ""

    def link(self, stride: int, size: int) -> Link:
        """The link that limits a group of so many ranks 0, stride, ...: within a node if all are on one."""
        return self.within_node if stride * (size - 1) < self.ranks_per_node else self.between_nodes

    def save(self, path: str | Path) -> None:
        """Write it as JSON.

        Raises:
            HanayoError: the file can't be written.
        """
        with writing(path):
            Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Machine":
        """Read a file that `save` wrote.

        Raises:
            HanayoError: there is no such file, or it holds something else.
        """
        with refusing(path, "machine", "the machine.json that hanayo doctor --measure writes"):
            data = json.loads(read_text(path, MAX_BYTES))
            for name in data:
                if name not in (known := [one.name for one in fields(cls)]):
                    raise HanayoError(f"{name!r} is unknown; {nearest(str(name), known)}")
            tables = {
                dtype: sorted((float(n), float(rate)) for n, rate in rows) for dtype, rows in data["matmul"].items()
            }
            links = {name: Link(**data[name]) for name in ("within_node", "between_nodes")}
            return cls(**data | links | {"matmul": {dtype: tuple(rows) for dtype, rows in tables.items()}})


def _data_sheet(
    name: str, flops: float, memory: float, bandwidth: float, link: float, network: float, source: str, ranks: int = 8
) -> Machine:
    """A GPU by its data sheet, and the shares of its peaks that an H200 has reached (docs/benchmarks/gpu.md)."""
    return Machine(
        name,
        ranks_per_node=ranks,
        memory=memory,
        matmul={"bfloat16": ((1.0, 0.74 * flops),), "float32": ((1.0, 0.37 * flops),)},  # TF32 has half of the peak
        memory_bandwidth=0.6 * bandwidth,  # of operations between products, as eager PyTorch runs them
        within_node=Link(15e-6, 0.8 * link),
        between_nodes=Link(15e-6, 0.8 * network),
        is_asynchronous=True,
        host_call=10e-6,
        host_collective=25e-6,
        host_action=280e-6,
        peak=flops,
        source=f"{source} per GPU; 0.74 of its peak for products, 0.6 for memory, as measured on an H200; assumed: 0.8 "
        "of its links, 15 us per message, and the host's times",
    )


# bf16 without sparsity, sums in fp32; bytes; bytes per second of memory, of links in a node, and between nodes
_GPUS = (
    ("h100", 989e12, 80e9, 3.35e12, 450e9, 50e9, "NVIDIA H100 SXM5 data sheet; DGX H100, 400 Gbit/s"),
    ("h200", 989e12, 141e9, 4.8e12, 450e9, 50e9, "NVIDIA H200 SXM data sheet; DGX H200, 400 Gbit/s"),
    ("gb200", 2500e12, 186e9, 8e12, 900e9, 50e9, "NVIDIA GB200 NVL72 data sheet; 400 Gbit/s", 72),
    ("b200", 2250e12, 180e9, 7.7e12, 900e9, 50e9, "NVIDIA HGX B200 data sheet; DGX B200, 400 Gbit/s"),
    ("a100", 312e12, 80e9, 2.039e12, 300e9, 25e9, "NVIDIA A100 80GB SXM data sheet; DGX A100, 200 Gbit/s"),
    ("mi300x", 1307e12, 192e9, 5.3e12, 448e9, 50e9, "AMD Instinct MI300X data sheet; 7 links, 400 Gbit/s"),
    ("l40s", 362e12, 48e9, 864e9, 32e9, 25e9, "NVIDIA L40S data sheet; PCIe 4.0 x16, 200 Gbit/s"),
    ("rtx4090", 165e12, 24e9, 1.008e12, 32e9, 3e9, "NVIDIA Ada architecture paper; PCIe 4.0 x16, 25 Gbit/s"),
    ("rtx5090", 209e12, 32e9, 1.792e12, 64e9, 3e9, "NVIDIA Blackwell architecture paper; PCIe 5.0 x16, 25 Gbit/s"),
)
_CPU = Machine(
    "cpu", 8, 16e9, {"float32": ((1.0, 5e10),)}, 1e10, Link(3e-4, 1e9), Link(1e-3, 1e8), host_action=3e-4,
    source="a nominal core: 50 GFLOP/s, 10 GB/s, links of 1 GB/s and 100 MB/s; nothing was measured",
)  # fmt: skip
KNOWN = {"cpu": _CPU} | {gpu[0]: _data_sheet(*gpu) for gpu in _GPUS}
"""machines by their data sheets, and a nominal CPU"""


def machine(name: str) -> Machine:
    """One of the machines that are known by their data sheets, such as "h100"; or a nominal "cpu".

    Raises:
        HanayoError: it is another one.
    """
    if name not in KNOWN:
        raise HanayoError(
            f"device {name!r} is unknown; {nearest(name, KNOWN)}. For others measure: hanayo doctor --measure"
        )
    return KNOWN[name]
