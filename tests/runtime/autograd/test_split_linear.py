"""A swapped layer beside the layer itself: the same gradients to the last bit, in one piece (B) and in two (I, then W).

B    backward                 every gradient there
I    backward, queue open     input gradients there, weight gradients not
W    drain                    every gradient there
"""

import copy
import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.autograd import linear_patch
from lightning_hanayo.runtime.autograd.split_linear import _layers
from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue


class MLP(nn.Module):
    """Two layers and something between them that trains too."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=bias)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.norm(self.up(x))))


class InPlace(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.relu(self.up(x), inplace=True))


class Twice(MLP):
    """One layer is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.down(torch.tanh(self.up(x))))))


class Tied(MLP):
    """Two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(8, 16)
        self.more.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.down(self.more(x))


class Bare(MLP):
    """The weight is used beside its layer too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.up.weight.T @ self.down.weight.T


class Columns(MLP):
    """A layer gets what isn't contiguous, and what it gives meets a transposed gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, -2)).transpose(0, -2)


class Saves(MLP):
    """Activations are made again in the backward."""

    reentrant: bool

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class SavesReentrant(Saves):
    reentrant = True


class SavesOtherwise(Saves):
    reentrant = False


class Parametrized(MLP):
    """The weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)


class Adapter(nn.Linear):
    """A subclass, as adapters are: it stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Adapted(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.up = Adapter(8, 16)


class Force(MLP):
    """A block that differentiates within its forward, as models of energies do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(place).square().sum(), place, create_graph=True)
        return x + force


class SavesForce(MLP):
    """The same without a graph of its own, made again in the backward: no gradient of its may be kept."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=True)

    def _forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(place).square().sum(), place)
        return super().forward(x) + force


class Maps(MLP):
    """The layers run under a function transform."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(super().forward)(x)


def conv() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    return nn.Sequential(Conv1D(16, 8), nn.GELU(), Conv1D(8, 16))


def freeze_weight(model: Any) -> None:
    model.up.weight.requires_grad_(False)


def freeze_bias(model: Any) -> None:
    model.up.bias.requires_grad_(False)


def hook_weight(model: Any) -> None:
    model.up.weight.register_hook(lambda gradient: gradient * 2)


def hook_bias(model: Any) -> None:
    model.down.bias.register_hook(lambda gradient: gradient * 2)


def hook_accumulated(model: Any) -> None:
    def triple(parameter: Tensor) -> None:
        parameter.grad.mul_(3)

    model.up.weight.register_post_accumulate_grad_hook(triple)


def hook_gone(model: Any) -> None:
    model.up.weight.register_hook(lambda gradient: gradient * 2).remove()


def hook_module(model: Any) -> None:
    model.up.register_full_backward_hook(lambda module, entering, leaving: (2 * entering[0],))


def nothing(_: Any) -> None:
    pass


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None], set[str]]] = {
    # model, what is done to it, parameters whose gradients the queue can't hold back
    "plain": (MLP, nothing, set()),
    "no bias": (lambda: MLP(bias=False), nothing, set()),
    "in place": (InPlace, nothing, set()),
    "twice": (Twice, nothing, set()),
    "tied": (Tied, nothing, set()),
    "conv1d": (conv, nothing, set()),
    "checkpoint": (SavesReentrant, nothing, set()),
    "checkpoint, not reentrant": (SavesOtherwise, nothing, set()),
    "force in a checkpoint": (SavesForce, nothing, set()),
    "frozen weight": (MLP, freeze_weight, {"up.bias"}),
    "frozen bias": (MLP, freeze_bias, set()),
    "hook on the weight": (MLP, hook_weight, {"up.weight"}),
    "hook on the bias": (MLP, hook_bias, {"down.bias"}),
    "hook after accumulation": (MLP, hook_accumulated, {"up.weight"}),
    "hook on the module": (MLP, hook_module, set()),
    "hook removed": (MLP, hook_gone, set()),
    "beside its layer": (Bare, nothing, {"up.weight", "down.weight"}),
    "parametrized": (
        Parametrized,
        nothing,
        {"up.bias", "up.parametrizations.weight.original0", "up.parametrizations.weight.original1"},
    ),
    "subclass": (Adapted, nothing, {"up.weight", "up.bias"}),
    "force": (Force, nothing, {"up.weight", "up.bias", "down.weight", "down.bias"}),
    "vmap": (Maps, nothing, {"up.weight", "up.bias", "down.weight", "down.bias"}),
}
INEXACT = {"beside its layer", "force"}
"""here the parts of a micro-batch's gradient are added in another order"""

Pair = tuple[nn.Module, nn.Module, WeightGradientQueue]


def pair(name: str, dtype: torch.dtype = torch.float32) -> Pair:
    """The model as it is, and swapped."""
    torch.manual_seed(0)
    build, prepare, _ = CASES[name]
    plain = build().to(dtype)
    swapped = copy.deepcopy(plain)
    prepare(plain)
    prepare(swapped)
    queue = WeightGradientQueue()
    linear_patch.patch_linear_layers([swapped], queue)
    return plain, swapped, queue


def micro_batches(dtype: torch.dtype = torch.float32, *shape: int) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(*(shape or (2, 3, 8)), generator=random).to(dtype)


def backward(model: nn.Module, x: Tensor, context: Any = nullcontext) -> Tensor:
    with context():
        y = model(
            x.requires_grad_().clone()
        )  # no leaf: autocast would keep a leaf's cast, and add two users' parts in it
    y.float().square().sum().backward()
    assert x.grad is not None
    return x.grad


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(ours: nn.Module, theirs: nn.Module, *, exact: bool = True) -> None:
    for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if two.grad is None:
            assert one.grad is None, name
        elif exact:
            assert torch.equal(one.grad, two.grad), name
        else:
            torch.testing.assert_close(one.grad, two.grad)


def assert_equal_to_bf16(ours: nn.Module, theirs: nn.Module) -> None:
    """To a few roundings in bf16, which keeps 8 bits: 2^-6 of the largest gradient."""
    for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if two.grad is None:
            assert one.grad is None, name
        else:
            assert (one.grad - two.grad).abs().max() <= two.grad.abs().max() / 64, name


@pytest.mark.parametrize("name", CASES)
def test_backward_in_one_piece(name: str) -> None:
    plain, swapped, queue = pair(name)
    for x in micro_batches():
        assert torch.equal(backward(swapped, x.clone()), backward(plain, x.clone()))
        assert queue.num_bytes == 0
    assert_equal(swapped, plain)


@pytest.mark.parametrize("name", CASES)
def test_backward_in_two_pieces(name: str) -> None:
    plain, swapped, queue = pair(name)
    now = CASES[name][2]
    for microbatch, x in enumerate(micro_batches()):
        before = gradients(swapped)
        with queue.collecting(microbatch):
            ours = backward(swapped, x.clone())
        for part, gradient in gradients(swapped).items():  # I: what can wait has not been touched
            if part not in now and "norm" not in part and gradient is not None:
                assert torch.equal(gradient, before[part]), part
        queue.drain(microbatch)
        assert torch.equal(ours, backward(plain, x.clone()))
        assert queue.num_bytes == 0
    assert_equal(swapped, plain, exact=name not in INEXACT)


@pytest.mark.parametrize("shape", [(4, 8), (1, 8), (2, 3, 8), (2, 1, 3, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "no bias", "conv1d"])
def test_shapes_and_dtypes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    plain, swapped, queue = pair(name, dtype)
    for x in micro_batches(dtype, *shape):
        with queue.collecting(0):
            ours = backward(swapped, x.clone())
        queue.drain(0)
        assert torch.equal(ours, backward(plain, x.clone()))
    assert_equal(swapped, plain)


def test_a_vector_is_left_to_autograd() -> None:
    plain, swapped, queue = pair("plain")
    with queue.collecting(0):
        backward(swapped, torch.ones(8))
        assert queue.num_bytes == 0
    backward(plain, torch.ones(8))
    assert_equal(swapped, plain)


def test_not_contiguous_to_rounding() -> None:
    torch.manual_seed(0)
    plain = Columns().double()
    swapped, queue = copy.deepcopy(plain), WeightGradientQueue()
    linear_patch.patch_linear_layers([swapped], queue)
    for x in micro_batches(torch.float64):
        with queue.collecting(0):
            ours = backward(swapped, x.clone())
        queue.drain(0)
        torch.testing.assert_close(ours, backward(plain, x.clone()), rtol=0, atol=1e-12)
    assert_equal(swapped, plain, exact=False)


@pytest.mark.parametrize("split", [True, False], ids=["I and W", "B"])
@pytest.mark.parametrize("name", ["plain", "no bias", "conv1d", "twice", "tied", "hook on the weight", "frozen weight",
                                  "checkpoint", "checkpoint, not reentrant"])  # fmt: skip
def test_autocast_makes_weight_gradients_in_its_own_dtype(name: str, split: bool) -> None:
    plain, swapped, queue = pair(name)

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    for x in micro_batches():
        with queue.collecting(0) if split else nullcontext():
            ours = backward(swapped, x.clone(), autocast)
        queue.drain(0)
        assert torch.equal(ours, backward(plain, x.clone(), autocast))
    # a weight that is used twice: autocast's cache adds both parts in bf16, we add them in fp32 where nothing waits
    if name in ("twice", "tied") and not split:
        assert_equal_to_bf16(swapped, plain)
    else:
        assert_equal(swapped, plain)


def test_one_cast_weight_for_all_micro_batches_under_way() -> None:
    _, swapped, _ = pair("plain")
    layer, weight = vars(swapped.up)["_split_linear"], swapped.up.weight
    first = layer.cast(weight, torch.bfloat16)
    assert layer.cast(weight, torch.bfloat16) is first
    with torch.no_grad():
        weight.mul_(2)  # an optimizer's step
    assert torch.equal(layer.cast(weight, torch.bfloat16), weight.bfloat16())
    del first
    assert layer._cast[1]() is None  # nobody uses it


def test_an_autocast_weight_is_still_trained_where_it_is_used_bare() -> None:
    plain, swapped, _ = pair("beside its layer")
    for model in (plain, swapped):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 3, 8)).float().sum().backward()
    assert_equal_to_bf16(swapped, plain)


def test_without_an_input_gradient() -> None:
    plain, swapped, queue = pair("plain")
    plain.norm.requires_grad_(False)
    (x,) = (torch.ones(2, 3, 8),)
    plain(x).sum().backward()
    with queue.collecting(0):
        swapped(x).sum().backward()
    queue.drain(0)
    plain.norm.requires_grad_(True)
    assert torch.equal(swapped.up.weight.grad, plain.up.weight.grad)


def test_evaluation_is_the_layers_own() -> None:
    plain, swapped, queue = pair("plain")
    with torch.no_grad(), queue.collecting(0):
        assert torch.equal(swapped(torch.ones(2, 3, 8)), plain(torch.ones(2, 3, 8)))
    with torch.inference_mode():
        assert torch.equal(swapped(torch.ones(2, 3, 8)), plain(torch.ones(2, 3, 8)))


COMPILED = ["plain", "no bias", "in place", "tied", "conv1d", "frozen weight", "frozen bias", "hook on the weight",
            "hook after accumulation", "checkpoint, not reentrant"]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "split"),
    [*((name, True) for name in COMPILED), ("tied", False), ("hook on the weight", False)],
)
def test_compiled_in_one_graph(name: str, split: bool) -> None:
    torch._dynamo.reset()
    plain, swapped, queue = pair(name)
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    for microbatch, x in enumerate(micro_batches()):
        with queue.collecting(microbatch) if split else nullcontext():
            ours = backward(compiled, x.clone())
        if split:
            assert queue.num_bytes > 0
        queue.drain(microbatch)
        torch.testing.assert_close(ours, backward(plain, x.clone()))
    assert_equal(swapped, plain, exact=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("split", [True, False], ids=["I and W", "B"])
def test_compiled_under_autocast(split: bool) -> None:
    torch._dynamo.reset()
    plain, swapped, queue = pair("plain")
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    for x in micro_batches():
        with queue.collecting(0) if split else nullcontext():
            backward(compiled, x.clone(), autocast)
        queue.drain(0)
        backward(plain, x.clone(), autocast)
    assert_equal_to_bf16(swapped, plain)


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_of_one_kind_share_their_code() -> None:
    """A layer's number is no constant of the graph: more layers than torch recompiles for."""
    torch._dynamo.reset()
    queue = WeightGradientQueue()
    models = [MLP() for _ in range(12)]
    linear_patch.patch_linear_layers(models, queue)
    for model in models:
        with queue.collecting(0), torch._dynamo.config.patch(error_on_recompile=True):
            torch.compile(model, fullgraph=True, backend="aot_eager")(torch.ones(2, 8)).sum().backward()
        assert model.up.weight.grad is None
        queue.drain(0)
        assert model.up.weight.grad is not None


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_whose_weight_was_exchanged_is_refused() -> None:
    torch._dynamo.reset()
    _, swapped, _ = pair("plain")
    swapped.up.weight.data = swapped.up.weight.data.clone()
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    with pytest.raises(UnsupportedError, match=r"weight of shape \(16, 8\) in a compiled block has got new memory"):
        compiled(torch.ones(2, 8)).sum().backward()


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.thorough])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trains_input", [True, False])
def test_compiled_with_and_without_an_input_gradient(trains_input: bool, backend: str) -> None:
    """Without an input gradient the weights' products would be dead code, if they hung on nothing else."""
    torch._dynamo.reset()
    plain, swapped, queue = pair("plain")
    compiled = torch.compile(swapped, fullgraph=True, backend=backend)
    for x in micro_batches():
        with queue.collecting(0):
            compiled(x.clone().requires_grad_(trains_input)).square().sum().backward()
        assert queue.num_bytes > 0
        queue.drain(0)
        plain(x).square().sum().backward()
    for one, two in zip(swapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-4)


def test_a_layer_that_is_gone_leaves_nothing_behind() -> None:
    before = set(_layers)
    _, swapped, _ = pair("plain")
    assert len(set(_layers) - before) == 2
    del swapped
    gc.collect()
    assert set(_layers) <= before
