"""The model, the layouts that are run, and the paper's own comparison.

All layouts take the same samples per step. `sleep` in place of computation lets eight hosts compute at once.
"""

from dataclasses import dataclass, replace

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.planner.candidates import ONE_RANK, SPLIT, WHOLE, Candidate
from lightning_hanayo.planner.communication_volume import LinearLayer
from lightning_hanayo.planner.machine import Link, Machine
from lightning_hanayo.planner.model_facts import BlockFacts, ModelFacts

HOSTS, NODE = 8, 4
"""hosts, and those that Megatron's rule would take for a node"""
MEGATRON: MeshSizes = (1, NODE, 1)
"""the cube of Megatron's rule of thumb: tensor parallel in a node, pipeline between nodes"""
PROBES = (
    Candidate(data=4, pipe=2, samples=1, num_microbatches=8),
    Candidate(data=1, pipe=8, samples=1, num_microbatches=32),
)
"""the layouts that run without compute, with four layers in a stage and one: what the runtime takes for each"""
BYTES = 4
"""of an element"""


@dataclass(frozen=True)
class Model:
    """Transformer layers without norms, biases, embedding, head and optimizer, and how fast a host computes them."""

    layers: int = 16
    hidden: int = 128
    seq: int = 128
    samples: int = 32
    """of a step"""
    flops_per_second: float = 6e9

    @property
    def facts(self) -> ModelFacts:
        """What the planner knows of it."""
        h, seq = self.hidden, self.seq
        layers = (
            LinearLayer(seq, h, 3 * h),
            LinearLayer(seq, h, h, row_parallel=True),
            LinearLayer(seq, h, 4 * h),
            LinearLayer(seq, 4 * h, h, row_parallel=True),
        )
        block = BlockFacts(layers, parameters=12 * h * h, attention_flops=4.0 * seq * h * seq, calls=1)
        return ModelFacts(
            stack="layers", blocks=(block,) * self.layers, message=float(BYTES * seq * h), tokens=seq, optimizer_bytes=0
        )

    @property
    def instant(self) -> "Model":
        """The same without compute, and with messages so small that they take no time but their latency."""
        return replace(self, hidden=8, seq=8, flops_per_second=1e18)

    def machine(self, link: Link, action: float = 0.0, layer: float = 0.0) -> Machine:
        """The hosts: each a node of its own, with measured links.

        `action` and `layer`: seconds that the runtime takes for an action, and a layer's forward in it.
        """
        rates = {"float32": ((1.0, self.flops_per_second),)}
        return Machine("hosts", 1, 1e12, rates, 1e30, link, link, host_action=action, host_call=layer)


def layouts(samples: int) -> list[Candidate]:
    """Those that are run: pipelines, cubes and data ranks, alone and together.

    Each line: D, P, the cube, W, micro-batches, and the schedule of several pipeline ranks.
    """
    return [
        _layout(samples, 8, 1, (1, 1, 1), 1, 1),
        _layout(samples, 4, 2, (1, 1, 1), 1, 8),
        _layout(samples, 4, 2, (1, 1, 1), 2, 8),
        _layout(samples, 4, 2, (1, 1, 1), 1, 4),
        _layout(samples, 2, 4, (1, 1, 1), 1, 16),
        _layout(samples, 2, 4, (1, 1, 1), 2, 16),
        _layout(samples, 2, 4, (1, 1, 1), 1, 8),
        _layout(samples, 2, 4, (1, 1, 1), 2, 8),
        _layout(samples, 2, 4, (1, 1, 1), 2, 8, WHOLE),
        _layout(samples, 1, 8, (1, 1, 1), 1, 32),
        _layout(samples, 1, 8, (1, 1, 1), 1, 16),
        _layout(samples, 1, 8, (1, 1, 1), 1, 16, WHOLE),
        _layout(samples, 1, 1, (8, 1, 1), 1, 1),
        _layout(samples, 1, 1, (8, 1, 1), 1, 2),
        _layout(samples, 1, 1, (4, 2, 1), 1, 1),
        _layout(samples, 1, 1, (4, 2, 1), 1, 2),
        _layout(samples, 1, 1, (2, 2, 2), 1, 1),
        _layout(samples, 1, 1, (2, 4, 1), 1, 1),
        _layout(samples, 1, 1, (1, 8, 1), 1, 1),
        _layout(samples, 1, 4, (2, 1, 1), 2, 4),
        _layout(samples, 1, 4, (1, 2, 1), 2, 4),
        _layout(samples, 2, 2, (2, 1, 1), 2, 4),
        _layout(samples, 2, 2, (1, 2, 1), 2, 4),
        _layout(samples, 1, 2, (4, 1, 1), 2, 4),
        _layout(samples, 1, 2, (2, 2, 1), 2, 4),
        _layout(samples, 1, 2, MEGATRON, 2, 4),
        _layout(samples, 4, 1, (2, 1, 1), 1, 1),
        _layout(samples, 2, 1, (2, 2, 1), 1, 1),
    ]


def is_megatron(one: Candidate) -> bool:
    """Whether Megatron's rule of thumb would take it."""
    return one.mesh == MEGATRON and one.pipe == HOSTS // NODE


def _layout(
    samples: int, data: int, pipe: int, mesh: MeshSizes, waves: int, count: int, schedule: str = SPLIT
) -> Candidate:
    size = samples // (data * count)
    return Candidate(data, pipe, mesh, waves, size, count, schedule=schedule if pipe > 1 else ONE_RANK)


@dataclass(frozen=True)
class Contender:
    """One schedule of the paper's comparison: `pipelines` of `pipe` ranks, each with its part of the micro-batches."""

    name: str
    schedule: str
    waves: int
    pipe: int
    pipelines: int
    microbatches: int

    @property
    def share(self) -> float:
        """A rank's share of the model, in that of a rank of the whole number of hosts."""
        return HOSTS / self.pipe


INSTANT = Contender("hanayo W=2", "hanayo", 2, HOSTS, 1, HOSTS)
"""the one that runs without compute, too"""


def contenders(pipe: int) -> list[Contender]:
    """The paper's, with B = P: chimera in wave form is one wave on half of the ranks, in twice as many pipelines."""
    pipelines = HOSTS // pipe
    same = [("gpipe", "gpipe", 1), ("1f1b", "1f1b", 1), *((f"hanayo W={w}", "hanayo", w) for w in (1, 2, 4))]
    found = [Contender(name, schedule, waves, pipe, pipelines, pipe) for name, schedule, waves in same]
    return [*found[:2], Contender("chimera-wave", "hanayo", 1, pipe // 2, 2 * pipelines, pipe // 2), *found[2:]]
