"""A patched layer compared with the layer itself: gradients are bit-equal, in one piece (B) and in two (I, then W).

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
from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue, _layers
from tests.harness.thorough import covered
from tests.runtime.queued_bytes import queued_bytes


class MLP(nn.Module):
    """Two layers, and between them a module that trains too."""

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
    """The weight is also used outside its layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.up.weight.T @ self.down.weight.T


class Columns(MLP):
    """A layer's input is not contiguous, and its output gets a transposed gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, -2)).transpose(0, -2)


class Saves(MLP):
    """Activations are recomputed in the backward."""

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
    """A subclass, like an adapter: it is left as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Adapted(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.up = Adapter(8, 16)


class Force(MLP):
    """A block that differentiates in its forward, like energy models."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(place).square().sum(), place, create_graph=True)
        return x + force


class SavesForce(MLP):
    """The same without a graph, recomputed in the backward: none of its gradients may be kept."""

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
    "outside its layer": (Bare, nothing, {"up.weight", "down.weight"}),
    "parametrized": (
        Parametrized,
        nothing,
        {"up.bias", "up.parametrizations.weight.original0", "up.parametrizations.weight.original1"},
    ),
    "subclass": (Adapted, nothing, {"up.weight", "up.bias"}),
    "force": (Force, nothing, {"up.weight", "up.bias", "down.weight", "down.bias"}),
    "vmap": (Maps, nothing, {"up.weight", "up.bias", "down.weight", "down.bias"}),
}
INEXACT = {"outside its layer", "force"}
"""with these, the parts of a micro-batch's gradient are added in another order"""

Pair = tuple[nn.Module, nn.Module, WeightGradientQueue]


def pair(name: str, dtype: torch.dtype = torch.float32) -> Pair:
    """The plain model and the patched one."""
    torch.manual_seed(0)
    build, prepare, _ = CASES[name]
    plain = build().to(dtype)
    patched = copy.deepcopy(plain)
    prepare(plain)
    prepare(patched)
    queue = WeightGradientQueue()
    split_backward.patch_linear_layers([patched], queue)
    return plain, patched, queue


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
    """Up to a few roundings in bf16, which has 8 bits: 2^-6 of the largest gradient."""
    for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if two.grad is None:
            assert one.grad is None, name
        else:
            assert (one.grad - two.grad).abs().max() <= two.grad.abs().max() / 64, name


@pytest.mark.parametrize("name", CASES)
def test_backward_in_one_piece(name: str) -> None:
    plain, patched, queue = pair(name)
    for x in micro_batches():
        assert torch.equal(backward(patched, x.clone()), backward(plain, x.clone()))
        assert queued_bytes(queue) == 0
    assert_equal(patched, plain)


@pytest.mark.parametrize("name", CASES)
def test_backward_in_two_pieces(name: str) -> None:
    plain, patched, queue = pair(name)
    now = CASES[name][2]
    for microbatch, x in enumerate(micro_batches()):
        before = gradients(patched)
        with queue.collecting(microbatch):
            ours = backward(patched, x.clone())
        for part, gradient in gradients(patched).items():  # I: what can wait has not been touched
            if part not in now and "norm" not in part and gradient is not None:
                assert torch.equal(gradient, before[part]), part
        queue.drain(microbatch)
        assert torch.equal(ours, backward(plain, x.clone()))
        assert queued_bytes(queue) == 0
    assert_equal(patched, plain, exact=name not in INEXACT)


@pytest.mark.parametrize("shape", [(4, 8), (1, 8), (2, 3, 8), (2, 1, 3, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "no bias", "conv1d"])
def test_shapes_and_dtypes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    plain, patched, queue = pair(name, dtype)
    for x in micro_batches(dtype, *shape):
        with queue.collecting(0):
            ours = backward(patched, x.clone())
        queue.drain(0)
        assert torch.equal(ours, backward(plain, x.clone()))
    assert_equal(patched, plain)


def test_a_vector_is_left_to_autograd() -> None:
    plain, patched, queue = pair("plain")
    with queue.collecting(0):
        backward(patched, torch.ones(8))
        assert queued_bytes(queue) == 0
    backward(plain, torch.ones(8))
    assert_equal(patched, plain)


def test_not_contiguous_up_to_rounding() -> None:
    torch.manual_seed(0)
    plain = Columns().double()
    patched, queue = copy.deepcopy(plain), WeightGradientQueue()
    split_backward.patch_linear_layers([patched], queue)
    for x in micro_batches(torch.float64):
        with queue.collecting(0):
            ours = backward(patched, x.clone())
        queue.drain(0)
        torch.testing.assert_close(ours, backward(plain, x.clone()), rtol=0, atol=1e-12)
    assert_equal(patched, plain, exact=False)


@pytest.mark.parametrize("split", [True, False], ids=["I and W", "B"])
@pytest.mark.parametrize("name", ["plain", "no bias", "conv1d", "twice", "tied", "hook on the weight", "frozen weight",
                                  "checkpoint", "checkpoint, not reentrant"])  # fmt: skip
def test_autocast_makes_weight_gradients_in_its_own_dtype(name: str, split: bool) -> None:
    plain, patched, queue = pair(name)

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    for x in micro_batches():
        with queue.collecting(0) if split else nullcontext():
            ours = backward(patched, x.clone(), autocast)
        queue.drain(0)
        assert torch.equal(ours, backward(plain, x.clone(), autocast))
    # a weight that is used twice: autocast's cache adds both parts in bf16, we add them in fp32 where nothing waits
    if name in ("twice", "tied") and not split:
        assert_equal_to_bf16(patched, plain)
    else:
        assert_equal(patched, plain)


def test_one_cast_weight_for_all_micro_batches_under_way() -> None:
    _, patched, _ = pair("plain")
    layer, weight = vars(patched.up)["_split_linear"], patched.up.weight
    first = layer.cast(weight, torch.bfloat16)
    assert layer.cast(weight, torch.bfloat16) is first
    with torch.no_grad():
        weight.mul_(2)  # an optimizer's step
    assert torch.equal(layer.cast(weight, torch.bfloat16), weight.bfloat16())
    del first
    assert layer._cast[1]() is None  # nothing uses it


def test_a_weight_under_autocast_also_trains_outside_its_layer() -> None:
    plain, patched, _ = pair("outside its layer")
    for model in (plain, patched):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 3, 8)).float().sum().backward()
    assert_equal_to_bf16(patched, plain)


def test_without_an_input_gradient() -> None:
    plain, patched, queue = pair("plain")
    plain.norm.requires_grad_(False)
    (x,) = (torch.ones(2, 3, 8),)
    plain(x).sum().backward()
    with queue.collecting(0):
        patched(x).sum().backward()
    queue.drain(0)
    plain.norm.requires_grad_(True)
    assert torch.equal(patched.up.weight.grad, plain.up.weight.grad)


def test_evaluation_uses_the_layers_own_forward() -> None:
    plain, patched, queue = pair("plain")
    with torch.no_grad(), queue.collecting(0):
        assert torch.equal(patched(torch.ones(2, 3, 8)), plain(torch.ones(2, 3, 8)))
    with torch.inference_mode():
        assert torch.equal(patched(torch.ones(2, 3, 8)), plain(torch.ones(2, 3, 8)))


COMPILED = ["plain", "no bias", "in place", "tied", "conv1d", "frozen weight", "frozen bias", "hook on the weight",
            "hook after accumulation", "checkpoint, not reentrant"]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "split"),
    covered(
        [*((name, True) for name in COMPILED), ("tied", False), ("hook on the weight", False)],
        by=[(name, True) for name in ("plain", "tied", "hook on the weight", "checkpoint, not reentrant")],
    ),
)
def test_compiled_in_one_graph(name: str, split: bool) -> None:
    torch._dynamo.reset()
    plain, patched, queue = pair(name)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    for microbatch, x in enumerate(micro_batches()):
        with queue.collecting(microbatch) if split else nullcontext():
            ours = backward(compiled, x.clone())
        if split:
            assert queued_bytes(queue) > 0
        queue.drain(microbatch)
        torch.testing.assert_close(ours, backward(plain, x.clone()))
    assert_equal(patched, plain, exact=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("split", [True, False], ids=["I and W", "B"])
def test_compiled_under_autocast(split: bool) -> None:
    torch._dynamo.reset()
    plain, patched, queue = pair("plain")
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    for x in micro_batches():
        with queue.collecting(0) if split else nullcontext():
            backward(compiled, x.clone(), autocast)
        queue.drain(0)
        backward(plain, x.clone(), autocast)
    assert_equal_to_bf16(patched, plain)


@pytest.mark.filterwarnings("ignore")
def test_equal_compiled_layers_share_their_code() -> None:
    """A layer's number is not a constant of the graph: there are more layers than torch recompiles for."""
    torch._dynamo.reset()
    queue = WeightGradientQueue()
    models = [MLP() for _ in range(12)]
    split_backward.patch_linear_layers(models, queue)
    for model in models:
        with queue.collecting(0), torch._dynamo.config.patch(error_on_recompile=True):
            torch.compile(model, fullgraph=True, backend="aot_eager")(torch.ones(2, 8)).sum().backward()
        assert model.up.weight.grad is None
        queue.drain(0)
        assert model.up.weight.grad is not None


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_whose_weight_has_new_memory_raises_an_error() -> None:
    torch._dynamo.reset()
    _, patched, _ = pair("plain")
    patched.up.weight.data = patched.up.weight.data.clone()
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    with pytest.raises(UnsupportedError, match=r"weight of shape \(16, 8\) in a compiled block has got new memory"):
        compiled(torch.ones(2, 8)).sum().backward()


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.thorough])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trains_input", [True, False])
def test_compiled_with_and_without_an_input_gradient(trains_input: bool, backend: str) -> None:
    """Without an input gradient the weight gradients would be dead code if no output depended on them."""
    torch._dynamo.reset()
    plain, patched, queue = pair("plain")
    compiled = torch.compile(patched, fullgraph=True, backend=backend)
    for x in micro_batches():
        with queue.collecting(0):
            compiled(x.clone().requires_grad_(trains_input)).square().sum().backward()
        assert queued_bytes(queue) > 0
        queue.drain(0)
        plain(x).square().sum().backward()
    for one, two in zip(patched.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-4)


def test_a_deleted_layer_frees_everything() -> None:
    before = set(_layers)
    _, patched, _ = pair("plain")
    assert len(set(_layers) - before) == 2
    del patched
    gc.collect()
    assert set(_layers) <= before
