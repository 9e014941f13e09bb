"""Functions, masks of FlexAttention, nested tensors and caches come back from skeleton and tensors as they were."""

import json
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.p2p import Spec
from lightning_hanayo.pipeline_parallel.pytree import Flattener, unflatten, with_ragged_dims_of

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LENGTHS = torch.tensor([2, 4])


def arrived(value: Any) -> Any:
    """The value on another rank."""
    flattener = Flattener()
    spec = Spec(flattener.flatten(value, "the argument", is_argument=True), ())
    return unflatten(Spec.from_bytes(spec.to_bytes()).skeleton, flattener.tensors)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


OFFSET = 0


def shifted(key: Tensor) -> Tensor:
    return key + OFFSET


def of_globals(key: Tensor) -> Tensor:
    return shifted(key) + LENGTHS


anywhere = lambda batch, head, query, key: query > -1  # noqa: E731


def window(size: int) -> Mask:
    return lambda batch, head, query, key: (query - key).abs() < size


def padded(lengths: Tensor, *, offset: int = 0) -> Mask:
    def before(lengths: Tensor, batch: Tensor, key: Tensor) -> Tensor:
        return key + offset < lengths[batch]

    def is_no_padding(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return before(lengths, batch, key)

    return is_no_padding


def of_two(first: int, second: int) -> tuple[Mask, Mask]:
    return (lambda b, h, q, k: q - k > first), (lambda b, h, q, k: q - k > second)


class Masks:
    class Inner: ...

    @property
    def local(self) -> Mask:
        size = 2
        return lambda batch, head, query, key: (query - key).abs() < size


MASKS: dict[str, Mask] = {
    "of a module": causal,
    "a lambda of a module": anywhere,
    "a lambda with a number": window(2),
    "with a tensor and another function": padded(LENGTHS, offset=1),
    "the second of two on one line": of_two(0, 1)[1],
    "in a property": Masks().local,
    "torch's own": and_masks(causal, padded(LENGTHS)),
}


@pytest.mark.parametrize("kind", MASKS)
def test_functions(kind: str) -> None:
    expected, got = (create_mask(mask, 2, 1, 4, 4, device="cpu") for mask in (MASKS[kind], arrived(MASKS[kind])))
    assert torch.equal(got, expected)


def with_defaults(x: int, y: int = 2, *, z: int = 3) -> int:
    return x + y + z


def test_global_numbers_and_tensors_are_those_of_the_rank_that_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as step:
        step.setitem(globals(), "OFFSET", 2)
        step.setitem(globals(), "LENGTHS", torch.tensor([5]))
        function = arrived(of_globals)
    assert function(torch.tensor(1)).tolist() == [8] and of_globals(torch.tensor(1)).tolist() == [3, 5]


def test_a_class_inside_another() -> None:
    assert arrived(Masks.Inner) is Masks.Inner


def test_defaults_and_partials() -> None:
    assert arrived(with_defaults)(1) == 6
    assert arrived(partial(with_defaults, 1, z=5))() == 8


@pytest.mark.parametrize("mask", [causal, padded(LENGTHS)])
def test_block_masks(mask: Mask) -> None:
    block_mask = create_block_mask(mask, 2, None, 4, 4, device="cpu", BLOCK_SIZE=2)
    got = arrived(block_mask)
    assert type(got) is BlockMask and got.shape == block_mask.shape
    assert torch.equal(got.to_dense(), block_mask.to_dense())


class Model:
    def mask(self) -> Mask:
        return lambda batch, head, query, key: query - key < self.size

    size = 2


def calls_itself() -> Callable[[int], int]:
    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    return factorial


def of_unknown_module(code: str) -> Any:
    """What importlib makes of a file, without an entry in sys.modules."""
    module = ModuleType("plugin")
    exec(code, vars(module))
    return module.made  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value",
    [
        Model().mask(),
        Model().mask,
        calls_itself(),
        json.JSONEncoder(),
        eval("lambda: 1"),
        of_unknown_module("def made(): pass"),
        of_unknown_module("class made: pass"),
        type("local", (), {}),
    ],
)
def test_what_is_refused(value: Any) -> None:
    with pytest.raises(
        UnsupportedError, match="the argument.* is a .*, which can't be sent to the next pipeline stage"
    ):
        arrived(value)


def jagged() -> Tensor:
    parts = [torch.arange(n * 2.0).view(n, 2) for n in (1, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def test_jagged_tensors_and_their_gradients() -> None:
    nested = jagged()
    (2 * arrived([nested])[0]).values().sum().backward()
    assert nested.grad is not None and torch.equal(nested.grad.values(), torch.full((4, 2), 2.0))


def test_a_jagged_tensor_gets_its_ragged_dimension_back() -> None:
    nested = jagged()
    with pytest.raises(RuntimeError, match="cannot call binary pointwise function"):
        nested + _received(nested)
    (again,) = with_ragged_dims_of([nested], (_received(nested),))
    assert torch.equal((nested + again).values(), 2 * nested.values())


def _received(nested: Tensor) -> Tensor:
    flattener = Flattener()
    skeleton = flattener.flatten(nested)
    received: Tensor = unflatten(skeleton, [tensor.clone() for tensor in flattener.tensors])
    return received


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested Tensor .torch.strided"),
        (lambda: torch.eye(2).to_sparse(), "Tensor .torch.sparse_coo"),
    ],
)
def test_other_layouts_are_refused(make: Callable[[], Tensor], shown: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the argument is a {shown}.*Strided tensors can"):
        arrived(make())


def test_a_mask_that_all_blocks_get_is_sent_once() -> None:
    mask, flattener = create_block_mask(padded(LENGTHS), 2, None, 4, 4, device="cpu"), Flattener()
    skeletons = [flattener.flatten(mask, is_argument=True) for _ in range(3)]
    assert skeletons[0] is skeletons[1] is skeletons[2] and len(flattener.tensors) == len(
        set(map(id, flattener.tensors))
    )
