"""How tensors at the stack's boundary are cut into micro-batches, and joined."""

import pytest
import torch

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.microbatches import sizes, uneven_sizes
from lightning_hanayo.pipeline_parallel.capture.whole_step import CutTensor, grown_dim


def test_parts_give_their_gradients_to_the_whole() -> None:
    whole = torch.randn(3, 6, 2, requires_grad=True)
    cut = CutTensor(whole, 1, [2, 1])
    assert [tuple(part.shape) for part in cut.parts] == [(3, 4, 2), (3, 2, 2)]
    assert cut.gradient is None
    (cut.parts[1] * 3).sum().backward()
    assert cut.gradient is not None
    assert torch.equal(cut.gradient, torch.cat([torch.zeros(3, 4, 2), torch.full((3, 2, 2), 3.0)], 1))


def test_a_tensor_that_all_samples_share_gets_the_sum() -> None:
    cut = CutTensor(torch.ones(2, requires_grad=True), None, [2, 2])
    (cut.parts[0].sum() + 2 * cut.parts[1].sum()).backward()
    assert cut.gradient is not None and cut.gradient.tolist() == [3, 3]


def test_a_part_counts_its_changes_in_place_for_itself() -> None:
    cut = CutTensor(torch.zeros(4), 0, [2, 2])
    kept = (cut.parts[1].clone().requires_grad_() * cut.parts[1]).sum()
    cut.parts[0].add_(1)
    kept.backward()


@pytest.mark.parametrize(
    ("whole", "part", "dim"),
    [
        ((8, 5), (2, 5), 0),
        ((5, 8, 3), (5, 2, 3), 1),
        ((8, 5), (8, 5), None),
        ((24, 1, 7), (6, 1, 7), 0),
        ((), (), None),
    ],
)
def test_the_dimension_that_grows_is_cut(whole: tuple[int, ...], part: tuple[int, ...], dim: int | None) -> None:
    assert grown_dim(torch.empty(whole), torch.empty(part), 1 / 4) == dim


@pytest.mark.parametrize(("whole", "part"), [((24, 5), (7, 5)), ((8, 8), (2, 2)), ((8, 5), (2, 5, 1)), ((9,), (3,))])
def test_packed_samples_are_refused(whole: tuple[int, ...], part: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match="it has no dimension along which it can be cut"):
        grown_dim(torch.empty(whole), torch.empty(part), 1 / 4)


def test_sizes_differ_where_they_can() -> None:
    for samples in range(1, 20):
        for limit in range(1, 9):
            made = uneven_sizes(samples, limit)
            assert sum(made) == samples and 1 <= len(made) <= limit and min(made) > 0
            usual = sizes(samples, limit)
            assert len(set(made)) > 1 or len(usual) == 1 or samples == len(usual) == 2
            assert min(made) > 1 or samples < 4 or samples < 2 * len(usual) or len(usual) < 4
