"""What is compared: 1-D and three meshes of eight hosts, their micro-batches one by one and in pairs."""

from collections.abc import Sequence

from recipes.benchmarks.cluster import Link
from recipes.benchmarks.pairs.rank import Plan, Run
from recipes.benchmarks.pairs.tables import ALONE, STEADY, TWINS
from recipes.benchmarks.schemes.names import ONE_D, three_d
from recipes.benchmarks.tensor3d import speed_of
from recipes.benchmarks.tensor3d_rank import Case

HOSTS, PIECES = 8, 4
PEER = Run(ONE_D[0], ALONE, queue=False)
"""1-D as Megatron runs it: with which all others are compared"""


def plan_of(link: Link, hidden: int, multiple: int, microbatches: Sequence[int], rounds: int) -> Plan:
    """Micro-batches of `multiple` times as many tokens as the hidden size."""
    meshes = (2, 2, 2), (4, 2, 1), (8, 1, 1)
    runs = [PEER, Run(ONE_D[0], STEADY)]
    for mesh in meshes:
        whole, kept, pieces = three_d(mesh), three_d(mesh, keep_weights=True), three_d(mesh, PIECES)
        runs += [Run(whole, ALONE, queue=False), Run(whole, ALONE), Run(whole, STEADY)]
        runs += [] if mesh == meshes[-1] else [Run(whole, TWINS)]
        runs += [Run(kept, ALONE), Run(kept, STEADY)]
        runs += [] if mesh == meshes[-1] else [Run(pieces, ALONE), Run(pieces, STEADY)]
    tokens = multiple * hidden
    case = Case(f"M = {multiple}h", HOSTS, tokens, hidden, (), speed_of(link, tokens, hidden))
    return Plan(case, tuple(runs), tuple(microbatches), rounds)
