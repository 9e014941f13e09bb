"""Ranks that call different layers are told so, instead of waiting for each other.

rank 0    first   second  end
rank 1    first   end
"""

import pytest
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.tensor_parallel.collectives import END, CallOrder
from lightning_hanayo.tensor_parallel.mesh import Mesh
from tests.harness.mesh import make_mesh, process_group
from tests.harness.pool import Pool


def calls() -> tuple[int, str]:
    """What the ranks agree on in the first column, and the error in the second one."""
    with process_group():
        mesh = make_mesh((1, 2, 1))
        order, rank = CallOrder(mesh), mesh.index("y")
        first, second = order.add(nn.Linear(2, 2)), order.add(nn.Linear(2, 2))
        largest = order.check(first, 3 + rank)
        with pytest.raises(UnsupportedError) as raised:
            order.check(second if rank == 0 else END)
    return largest, str(raised.value)


def test_ranks_that_call_different_layers_get_an_error(pool: Pool) -> None:
    (largest, first), (other_largest, second) = pool.run(2, calls)
    assert largest == other_largest == 4
    assert "this rank calls layer 2, while another rank of its cube calls no further layer" in first
    assert "this rank calls no further layer, while another rank of its cube calls layer 2" in second


def test_a_single_rank_asks_nobody() -> None:
    order = CallOrder(Mesh.single())
    assert order.check(order.add(nn.Linear(2, 2)), 5) == 5
