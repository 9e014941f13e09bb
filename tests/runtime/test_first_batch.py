"""Blocks and steps whose gradients or samples don't add up over micro-batches are known from micro-batch 0 alone.

x * 2                 a mean over samples injected      g / g.norm()      x - x.mean(0)
right as it is        gradients are averaged            an error          a warning
"""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture import forward_patch
from lightning_hanayo.pipeline_parallel.first_batch import FirstBatch
from lightning_hanayo.pipeline_parallel.nan import MadeValues
from tests.harness.models import Auxiliary

WIDTH = 4


class Block(nn.Module):
    """Calls a function of the hidden state."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(self.linear(x).tanh())


class Normalize(torch.autograd.Function):
    """Divides the gradient of a batch by its norm."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(hook)
        return x

    return change


def injected(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: Auxiliary.apply(x, loss(x))


def balance(x: Tensor) -> Tensor:
    p = x.softmax(-1).flatten(0, -2)
    return ((p > 1 / WIDTH).double().mean(0) * p.mean(0)).sum()


def inputs(samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


def prepared(*blocks: nn.Module, **options: Any) -> FirstBatch:
    values = MadeValues()
    forward_patch.patch_blocks(blocks, values=values)
    device = torch.device("cpu")
    return FirstBatch(blocks=dict(enumerate(blocks)), values=values, device=device, num_microbatches=4, **options)


def examine(block: nn.Module, samples: int = 4, **options: Any) -> FirstBatch:
    """Run a block as for micro-batch 0 of 4, the examination, and the backward."""
    first = prepared(block, **options)
    with first.recording():
        made = block(inputs(samples or 1))  # a rank without samples runs one that doesn't count
    first.examine(Batch(), samples)
    made.square().mean().backward()
    return first


RIGHT = {
    "nothing": lambda x: x,
    "dropout": lambda x: functional.dropout(x, 0.5),
    "a sum injected": injected(lambda x: x.square().sum()),
    "clamped": hooked(lambda g: g.clamp(-0.1, 0.1)),
    "noise": hooked(lambda g: g + torch.randn_like(g)),
    "normalized for each sample": hooked(lambda g: g / (g.norm(dim=(1, 2), keepdim=True) + 1e-9)),
}


@pytest.mark.parametrize("samples", [4, 3, 1])
@pytest.mark.parametrize("change", RIGHT.values(), ids=RIGHT)
def test_weights_in_the_loss_stay_where_they_are_right(change: Any, samples: int) -> None:
    assert examine(Block(change), samples).late_weight == 1


@pytest.mark.parametrize("samples", [4, 1])
def test_gradients_are_averaged_for_an_injected_mean(samples: int) -> None:
    assert examine(Block(injected(lambda x: x.square().mean())), samples, num_data=2).late_weight == 1 / 8


@pytest.mark.parametrize("samples", [4, 1])
def test_an_injected_loss_of_all_samples_is_warned_of(samples: int) -> None:
    with pytest.warns(UserWarning, match=r"^Block \(block 0\): the gradient of an auxiliary loss .* 4 micro-batches"):
        assert examine(Block(injected(balance)), samples).late_weight == 1 / 4


MIXING = {
    "normalized": hooked(lambda g: g / g.norm()),
    "clipped by norm": hooked(lambda g: g / (g.norm() + 1e-9).clamp(min=1.0)),
    "centred": hooked(lambda g: g - g.mean(0)),
    "normalized by a function": Normalize.apply,
}


@pytest.mark.parametrize("samples", [4, 1])
@pytest.mark.parametrize("change", MIXING.values(), ids=MIXING)
def test_gradients_that_mix_samples_are_rejected(change: Any, samples: int) -> None:
    with pytest.raises(UnsupportedError, match="computes with the gradients of all samples"):
        examine(Block(change), samples)


def test_in_a_cube_a_gradient_of_its_own_is_rejected() -> None:
    with pytest.raises(UnsupportedError, match="num_microbatches=1 and cube=1"):
        examine(Block(injected(lambda x: x.mean())), is_cube=True)


@pytest.mark.parametrize("samples", [4, 1])
def test_samples_that_depend_on_each_other_are_warned_of(samples: int) -> None:
    with pytest.warns(UserWarning, match=r"^Block \(block 0\): outputs or gradients .* 4 micro-batches"):
        examine(Block(lambda x: functional.dropout(x - 0.01 * x.mean(0), 0.1)), samples)


class ScaledToFp8(torch.autograd.Function):
    """A gradient is rounded to fp8, with a scale that its largest value decides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        scale = 400 / gradient.abs().max().clamp(min=1e-12)
        return (gradient * scale).to(torch.float8_e4m3fn).to(gradient.dtype) / scale


@pytest.mark.parametrize("samples", [4, 1])
def test_gradients_scaled_by_those_of_other_samples_are_warned_of(samples: int) -> None:
    with pytest.warns(UserWarning, match=r"^Block \(block 0\): outputs or gradients .* 4 micro-batches"):
        examine(Block(ScaledToFp8.apply), samples)


@pytest.mark.parametrize("change", [ScaledToFp8.apply, lambda x: x - 0.01 * x.mean(0)], ids=["fp8", "centred"])
def test_in_a_cube_samples_that_depend_on_each_other_are_rejected(change: Any) -> None:
    with pytest.raises(UnsupportedError, match="on a cube each rank runs this code on its own samples"):
        examine(Block(change), is_cube=True)


def counted(calls: Iterator[int]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * next(calls) if len(x) > 2 else x


def nan_if_many(x: Tensor) -> Tensor:
    return ScaledToFp8.apply(x * (nan if len(x) > 2 else 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "change", [ScaledToFp8.apply, torch.tanh, counted(count(1)), nan_if_many], ids=["fp8", "tanh", "counted", "NaN"]
)
def test_in_a_cube_blocks_run_equally_often_on_any_number_of_samples(change: Any) -> None:
    """One of 2, 1 and no samples; each call of a layer is a collective."""

    def calls(samples: int) -> int:
        block, found = Block(change), []
        block.linear.register_forward_hook(lambda *_: found.append(1))
        with suppress(UnsupportedError):
            examine(block, samples, is_cube=True)
        return len(found)

    assert calls(5) == calls(2) == calls(1) == calls(0) > 4


class WithWeight(Block):
    """Returns its weight, too, which has no samples."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.linear.weight.tanh()


def test_outputs_without_samples_count_in_one_half() -> None:
    block = WithWeight(injected(lambda x: 0 * x.sum()))
    first = prepared(block, is_cube=True)
    with first.recording():
        block(inputs(5))
    first.examine(Batch(), 5)


class Recurrent(Block):
    """Adds the state that a cache has of its samples, and stores the next one there."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        made = super().forward(x)
        if cache is not None:
            cache.state = made + 5e-6 * getattr(cache, "state", 0.0)
            made = cache.state
        return made


def test_in_a_cube_a_state_in_a_cache_is_not_that_of_other_samples() -> None:
    """A run would begin with the state of the run before, whose samples were others."""
    block = Recurrent(lambda x: x)
    first = prepared(block, is_cube=True)
    with first.recording():
        block(inputs(2), DynamicCache())
    first.examine(Batch(), 2)


def test_samples_may_be_in_any_dimension() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examine(Block(lambda x: x - x.mean(0)), samples=3)  # inputs are (3, 3, width): along the second one


def step(change: Callable[[Tensor], Tensor], block: nn.Module, samples: int = 4) -> FirstBatch:
    """Run a step with one block, and other code after it."""
    first = prepared(block)
    with first.recording():
        loss = change(block(inputs(samples)).detach().requires_grad_().tanh() * 2).square().mean()
    first.examine(Batch(step=lambda m: loss, results={0: loss}), samples)
    loss.backward()
    return first


@pytest.mark.parametrize("samples", [4, 1])
@pytest.mark.parametrize("name", ["nothing", "clamped"])
def test_a_step_of_single_samples_is_right(name: str, samples: int) -> None:
    step(RIGHT[name], Block(RIGHT["nothing"]), samples)


@pytest.mark.parametrize("samples", [4, 1])
def test_a_step_that_mixes_samples_is_rejected(samples: int) -> None:
    with pytest.raises(UnsupportedError, match="computes with the gradients of all samples"):
        step(MIXING["normalized"], Block(RIGHT["nothing"]), samples)


def test_a_step_that_injects_a_loss_is_rejected_by_the_name_of_its_function() -> None:
    with pytest.raises(UnsupportedError, match="^Auxiliary in the step's code outside the stack: .* adds"):
        step(injected(lambda x: x.mean()), Block(RIGHT["nothing"]))


def test_no_weights_are_right_for_a_mean_in_blocks_and_a_clamp_in_the_step() -> None:
    with pytest.raises(UnsupportedError, match="the hook"):
        step(RIGHT["clamped"], Block(injected(lambda x: x.mean())))


def test_a_function_that_scales_a_saved_gradient_in_place_has_run_before_it_is_tried() -> None:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.gradient = torch.ones_like(value)
            return value.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return ctx.gradient.mul_(gradient)

    first, x = prepared(Block(RIGHT["nothing"])), inputs(4)
    with first.recording():
        loss = Fused.apply(x * 1)
    first.examine(Batch(step=lambda m: loss, results={0: loss}), 4)
    loss.backward()
    assert x.grad is not None and bool((x.grad == 1).all())


class Marking(Block):
    """Leaves traces of all kinds."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.values = 0, [1.0]
        self.kept = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.kept.add_(1)
        self.values.append(random.random())
        return super().forward(x) + torch.rand(())


def test_it_leaves_no_trace() -> None:
    block = Marking()
    block.linear.weight.grad = gradient = torch.ones_like(block.linear.weight)
    torch.manual_seed(0)
    random.seed(0)
    first, register = prepared(block), Tensor.register_hook
    with first.recording():
        block(inputs(4))
    first.examine(Batch(), 4)
    after_one_call = torch.get_rng_state(), random.getstate()
    assert (block.calls, float(block.count), float(block.kept[0]), len(block.values)) == (1, 1.0, 1.0, 2)
    assert block.count._version == 1 and block.linear.weight.grad is gradient and bool((gradient == 1).all())
    assert block.linear.bias.grad is None and not first.values.calls and Tensor.register_hook is register
    torch.manual_seed(0)
    random.seed(0)
    torch.rand(())
    random.random()
    assert torch.equal(torch.get_rng_state(), after_one_call[0]) and random.getstate() == after_one_call[1]


def test_each_kind_of_block_is_examined_and_others_are_not() -> None:
    blocks = [*(Block(RIGHT["nothing"]) for _ in range(3)), Marking()]
    first = prepared(*blocks)
    with first.recording():
        for block in blocks:
            block(inputs(4))
    assert list(first.values.calls) == [0, 3] and all(first.values.calls.values())
