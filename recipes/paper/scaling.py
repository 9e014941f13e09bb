"""Simulates weak and strong scaling over D = 1, 2, 4 pipelines, P = 8, W = 2, with gradients summed over them.

Weak scaling keeps the batch of each pipeline, strong scaling keeps the total batch:

    D            1    2    4
    weak   B     8    8    8     micro-batches per pipeline
    strong B    32   16    8

Assumed is a ring all-reduce: a rank's share takes 2 (D-1)/D R, where R is the time in which its gradients cross the
link once. It overlaps with compute, stage by stage, each after its last backward.
"""

from functools import cache

from lightning_hanayo.schedule import CostModel, Schedule, build, simulate
from recipes.paper.clusters import WAVES, fit
from recipes.paper.page import markdown, percent
from recipes.paper.printed import STRONG, WEAK

CLUSTER = "A100, PCIe, two per node"
"""the cluster whose throughput at P = 8, W = 2 equals that of weak scaling at D = 1"""

LINKS = (0.0, 0.5, 1.0, 2.0)
"""R in T_F"""


@cache
def fitted_message() -> float:
    """T_C of that cluster, fitted to its 8-GPU rows."""
    return fit(CLUSTER, WAVES).message


def weak(degree: int, message: float, link: float) -> float:
    """Throughput of D pipelines with 8 micro-batches each, relative to D times that of one."""
    return makespan(8, 1, message, link) / makespan(8, degree, message, link)


def strong(degree: int, message: float, link: float) -> float:
    """Speed of D pipelines that share 32 micro-batches, relative to one."""
    return makespan(32, 1, message, link) / makespan(32 // degree, degree, message, link)


def makespan(num_microbatches: int, degree: int, message: float, link: float) -> float:
    """The step of one pipeline, gradient reduction included, in T_F."""
    costs = CostModel(message=message, gradient_reduce=2 * (degree - 1) / degree * link)
    return simulate(_wave(num_microbatches), costs).makespan


@cache
def _wave(num_microbatches: int) -> Schedule:
    return build("hanayo", num_ranks=8, num_microbatches=num_microbatches, num_waves=2)


def table() -> str:
    """The block `scaling`."""
    printed = [WEAK[d] / d / WEAK[1] for d in (2, 4)] + [STRONG[d] / 100 for d in (2, 4)]
    rows = [("printed [P]", *map(percent, printed)), ("groups of P one after another, R = 0", *_apart())]
    for message, link in [(0.0, 0.0), *((fitted_message(), link) for link in LINKS)]:
        cells = [of(degree, message, link) for of in (weak, strong) for degree in (2, 4)]
        rows.append((f"simulated, T_C = {message:.3f}, R = {link:g} T_F", *map(percent, cells)))
    return markdown(("", "weak, D = 2", "weak, D = 4", "strong, D = 2", "strong, D = 4"), rows)


def _apart() -> tuple[str, ...]:
    """Groups of P micro-batches run one after another, so D pipelines are D times as fast."""
    return tuple(map(percent, (1.0, 1.0, 2.0, 4.0)))
