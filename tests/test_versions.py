"""Changes in place are counted, also where a tensor has no count of its own, and equal values have equal hashes."""

import torch

from lightning_hanayo.versions import hashes_of, identity_of, version_of, versions_of


def test_a_change_in_place_and_another_tensor_are_seen() -> None:
    tensor = torch.zeros(2)
    before = identity_of(tensor)
    assert identity_of(tensor) == before != identity_of(torch.zeros(2))
    tensor.add_(1)
    assert identity_of(tensor) != before and version_of(tensor) == 1


def test_inference_tensors_and_none_have_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2).add_(1)
    assert version_of(tensor) == 0 and identity_of(tensor) == (id(tensor), 0) and identity_of(None) == (0, 0)


def test_versions_of_many_tensors_count_those_of_inference_mode_as_0() -> None:
    changed = torch.zeros(2).add_(1)
    assert versions_of([changed, torch.zeros(2)]) == [1, 0]
    with torch.inference_mode():
        assert versions_of([changed, torch.zeros(2).add_(1)]) == [1, 0]


def test_the_hash_of_a_lazy_conjugate_is_that_of_its_values() -> None:
    """Read as it is stored, it would crash."""
    values = torch.randn(3, dtype=torch.complex64)
    lazy, resolved, own = hashes_of([values.conj(), values.conj().resolve_conj(), values])
    assert lazy == resolved != own
