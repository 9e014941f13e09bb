"""A part of a parameter refuses what is wrong on parts, and allows what is the same on each element."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import Part, PartialParameter, PartialValues


@contextmanager
def part_of(shape: tuple[int, ...] = (4, 2)) -> Iterator[nn.Parameter]:
    """A [2, 2] part of a parameter, as user code sees it; afterwards it is a plain parameter again."""
    parameter = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    vars(parameter)["_part"] = Part("layer.weight", shape)
    parameter.__class__ = PartialParameter
    yield parameter
    parameter.__class__ = nn.Parameter


WRONG: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "power": lambda p: p**2,
    "sum of data": lambda p: p.data.sum(),
    "mean of a gradient": lambda p: p.grad.mean(),
    "transposed": lambda p: p.T,
    "indexed": lambda p: p[0],
    "compared": lambda p: p == 1.0,
    "copied into another tensor": lambda p: torch.zeros(2, 2).copy_(p),
    "noise of its shape": lambda p: torch.randn_like(p),
    "added to a tensor": lambda p: p.data.add_(torch.ones(2, 2)),
    "added to a tensor by name": lambda p: p.data.add_(other=torch.ones(2, 2)),
    "added to a number": lambda p: torch.zeros(()).add_(p),
    "converted": lambda p: p.type(torch.float64),
    "its values converted by a name": lambda p: p.data.type("torch.DoubleTensor"),
    "differentiated": lambda p: torch.autograd.grad(p, [p]),
    "a shallow copy": lambda p: copy.copy(p).sum(),
    "a row": lambda p: p.data[0].zero_(),
    "an initial value": lambda p: nn.init.normal_(p),
    "a number": lambda p: p.detach().tolist(),
    "an array": lambda p: p.detach().numpy(),
    "in a list": lambda p: torch._foreach_norm([torch.ones(2), p]),
    "in a product": lambda p: nn.functional.linear(torch.ones(1, 2), p),
    "replaced": lambda p: setattr(p, "data", torch.ones(2, 2)),
    "saved": lambda p: pickle.dumps(p.detach()),
}


@pytest.mark.parametrize("compute", WRONG.values(), ids=WRONG)
def test_what_is_wrong_on_a_part_is_refused_by_name(compute: Callable[[nn.Parameter], Any]) -> None:
    with part_of() as part:
        part.grad = None
        vars(part)["_part"] = Part("layer.weight", (4, 2))
        with torch._C.DisableTorchFunctionSubclass():
            part.grad = torch.ones(2, 2)
        with pytest.raises(
            UnsupportedError, match=r"layer.weight, of which .* part of shape \(2, 2\) of the whole \(4, 2\).*full_par"
        ):
            compute(part)


def test_metadata_may_be_read_and_is_that_of_the_whole() -> None:
    with part_of() as part:
        assert part.shape == (4, 2) and part.dim() == 2 and part.numel() == 8 and len(part) == 4 and part.size(0) == 4
        assert part.data.shape == (4, 2) and torch.numel(part) == 8 and torch.ones(4, 2).is_same_size(part)
        assert part.dtype is torch.float32 and part.device.type == "cpu" and part.requires_grad and part.is_leaf
        assert part.grad is None and part in {part} and isinstance(part, nn.Parameter)
        assert repr(part) == "a part (2, 2) of layer.weight (4, 2)"
        part.requires_grad_(False)
        part.grad = None
        del part.grad
        assert not part.requires_grad


ARGUMENTS: list[tuple[Any, ...]] = [
    (), (0,), (1,), (2.0,), (None,), (torch.float64,), ("torch.DoubleTensor",), ("cpu",), (torch.ones(4, 4),),
    (torch.contiguous_format,), (lambda *_: None,),
]  # fmt: skip
OF_PARTS = {"_cdata", "__module__", "as_subclass"}
"""tell objects apart, and classes: asked for by who knows of parts"""


@pytest.mark.filterwarnings("ignore")
def test_no_method_returns_silently_what_depends_on_the_size_or_values_of_the_part() -> None:
    """What isn't refused is as of the whole [4, 4], or the part of it that this rank has."""
    silent = []
    for name, arguments in product(sorted(set(dir(Tensor)) - set(dir(object)) - OF_PARTS), ARGUMENTS):
        whole = nn.Parameter(torch.ones(4, 4))
        with part_of((4, 4)) as part, torch._C.DisableTorchFunctionSubclass():
            whole.data[:2, :2] = part
        try:
            expected = value_of(whole, name, arguments)
        except Exception:
            continue
        with part_of((4, 4)) as part:
            try:
                found = value_of(part, name, arguments)
            except UnsupportedError:
                continue
            if not (is_alike(found, expected) and is_alike(part, whole)):
                silent.append((name, arguments))
    assert silent == []


def value_of(tensor: Tensor, name: str, arguments: tuple[Any, ...]) -> Any:
    value = getattr(tensor, name)
    return value(*arguments) if callable(value) and not isinstance(value, Tensor) else value


def is_alike(found: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor):
        plain = (bool, int, float, str, tuple, torch.dtype, torch.device, type(None))
        return bool(found == expected) if isinstance(expected, plain) else type(found) is type(expected)
    with torch._C.DisableTorchFunctionSubclass():
        wanted = expected[:2, :2] if isinstance(found, PartialValues | PartialParameter) else expected
        return torch.equal(found.as_subclass(Tensor), wanted.as_subclass(Tensor)) and found.dtype is expected.dtype


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda values: values.mul_(0.5),
    "clamped": lambda values: values.clamp_(-1, 1),
    "zeroed": lambda values: values.zero_(),
    "shrunk": lambda values: values.sub_(0.1),
    "filled": lambda values: values.fill_(3),
    "given an initial value": lambda values: nn.init.constant_(values, 3),
    "zeroed in a list": lambda values: torch._foreach_zero_([values]),
    "scaled by a norm": lambda values: values.mul_(torch.tensor(0.5)),
    "divided by an operator": lambda values: values.__itruediv__(2),
    "added to itself": lambda values: values.add_(values.clone(), alpha=0.1),
    "averaged": lambda values: values.lerp_(values.detach().clone(), 0.5),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_elements_may_be_changed_in_place(change: Callable[[Tensor], Any]) -> None:
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    change(expected)
    with part_of() as part:
        change(part.data)
    assert torch.equal(part, expected)


def test_parts_of_two_parameters_are_not_combined() -> None:
    with part_of() as part, part_of() as other:
        vars(other)["_part"] = Part("other.weight", (4, 2))
        with pytest.raises(UnsupportedError):
            part.data.add_(other)


def test_a_copy_is_a_part_and_a_pickled_one_is_a_plain_parameter() -> None:
    with part_of() as part:
        copied = copy.deepcopy(part)
        assert type(copied) is PartialParameter and type(copy.deepcopy(part.data)) is PartialValues
        copied.data.lerp_(part, 0.1)
        with pytest.raises(UnsupportedError, match="layer.weight"):
            copied.sum()
        assert type(pickle.loads(pickle.dumps(part))) is nn.Parameter
