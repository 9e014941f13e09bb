"""Vectors on the diagonal: some ranks store them, every rank uses them, gradients come back to where they lie."""

import pytest
import torch

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.tensor3d.layers.diagonal_vector import Diagonal, diagonal_vector
from lightning_hanayo.tensor3d.mesh import Mesh
from tests.harness.mesh import CountingAxis, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool
from tests.tensor3d.comparing import too_large


def added_and_scaled(ranks: Mesh, features: str) -> dict[str, float]:
    """y = gain * x + bias, with x [batch/(x z), N/y] as a first linear layer leaves it, or with y and z swapped."""
    diagonal = Diagonal(ranks, 8, features)  # type: ignore[arg-type]
    torch.manual_seed(0)
    x, gain, bias = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((8, 8), (8,), (8,)))
    axes = "x" + diagonal.across, features
    own_x = part(x.detach(), ranks, *axes)
    own_gain, own_bias = (diagonal.of(vector.detach()).requires_grad_() for vector in (gain, bias))
    assert own_gain.numel() == (8 // (ranks.size("xy")) if ranks.place[1] == ranks.place[2] else 0)
    y = gain * x + bias
    CountingAxis.received.clear()
    own_y = diagonal_vector(own_gain, diagonal) * own_x + diagonal_vector(own_bias, diagonal)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    own_y.backward(part(gradient, ranks, *axes))
    width = 8 // ranks.size("xy") * (ranks.size("x") - 1) * 8
    assert CountingAxis.received["gather"] == 2 * width == CountingAxis.received["scatter"]
    assert gain.grad is not None and bias.grad is not None
    errors = {"y": error(own_y, part(y.detach(), ranks, *axes))}
    for name, own, whole in (("gain", own_gain.grad, gain.grad), ("bias", own_bias.grad, bias.grad)):
        expected = diagonal.of(whole)
        errors[name] = error(own, expected) if diagonal.is_on_it else float(own is None or own.numel())
    return errors


def vectors(sizes: Sizes) -> dict[str, float]:
    with process_group():
        ranks = make_mesh(sizes)
        cases = {features: added_and_scaled(ranks, features) for features in "yz"}
        with pytest.raises(HanayoError, match="9 entries doesn't divide by x"):
            Diagonal(ranks, 9)
        return {f"{case} {what}": e / 1e-10 for case, errors in cases.items() for what, e in errors.items()}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 2)], ids=str)
def test_equals_whole_vectors(pool: Pool, sizes: Sizes) -> None:
    x, y, z = sizes
    assert too_large(pool.run(x * y * z, vectors, sizes)) == []


def test_there_must_be_a_diagonal() -> None:
    ranks = Mesh.of((1, 1, 1), 0, lambda names: None)
    with pytest.raises(HanayoError, match=r"y and z are of one size; this grid is \(2, 2, 1\)"):
        Diagonal(Mesh((2, 2, 1), (0, 0, 0), ranks._axes), 8)
