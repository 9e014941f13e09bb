"""Hooks on modules in blocks and on parameters: rejected, unless they say that they use their own only."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.module_hooks import HookCount, check_hooks, check_parameter_hooks
from tests.harness import models

HOOKS = [
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook",
]  # fmt: skip


def keep(*_: Any) -> None:
    pass


def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / 2


halve.is_local = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_is_rejected_by_the_names_of_module_and_function(kind: str) -> None:
    block = nn.Sequential(nn.Linear(2, 2))
    count = HookCount(block.modules())
    getattr(block[0], kind)(partial(keep, 1))
    assert count() == 1
    with pytest.raises(UnsupportedError, match=r"^h\[1\]\.0 has the hook keep"):
        check_hooks(block.named_modules(prefix="h[1]"))


def test_the_message_says_where_the_function_is_and_how_to_accept_it() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(keep)
    with pytest.raises(UnsupportedError, match=r"keep \(.*test_module_hooks.py:\d+\).*keep.is_local = True"):
        check_hooks([("h", layer)])


def test_a_hook_that_declares_to_be_local_is_accepted() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(halve)
    check_hooks([("h", layer)])
    assert HookCount([layer])() == 1


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_rejected_by_name_unless_it_says_that_it_is_local(kind: str) -> None:
    layer = nn.Linear(2, 2)
    handle = getattr(layer.bias, kind)(keep)
    with pytest.raises(UnsupportedError, match=r"^h.bias has the hook keep \(.*once for each micro-batch.*is_local"):
        check_parameter_hooks({"h.weight": layer.weight, "h.bias": layer.bias})
    handle.remove()
    getattr(layer.bias, kind)(halve)
    check_parameter_hooks({"h.weight": layer.weight, "h.bias": layer.bias})


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_hooks_of_torch_are_accepted() -> None:
    layers = [weight_norm(nn.Linear(2, 2)), parametrizations.spectral_norm(nn.Linear(2, 2))]
    check_hooks((str(i), layer) for i, layer in enumerate(layers))
    assert HookCount(layers)() == 1


def test_hooks_that_transformers_leaves_after_a_run_are_accepted() -> None:
    model = models.gpt2()
    model.model(input_ids=torch.ones(1, 2, dtype=torch.long), output_hidden_states=True)
    assert HookCount(model.modules())() > 0
    check_hooks(model.named_modules())
